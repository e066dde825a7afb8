"""Builds a tokenizer from GGUF metadata, which stores the vocabulary and only names the pre-tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile, corrupt
from chairlift.loading.gguf.metadata import Metadata, token_id
from chairlift.loading.tokenizer import TokenizerFiles, add_special_tokens, refuse_damage, tokenizer_files

MAX_PIECE = 512  # characters; splitting a piece at every place is quadratic in its length
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class _Rules:
    """How text is split before byte-level BPE."""

    split: str | None = None  # None: the GPT-2 pattern
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word in the vocabulary is one token, regardless of merges
    add_bos: bool = False  # unless the file says otherwise


_GPT2 = _Rules()
_SMOLLM = _Rules(single_digits=True)
_LLAMA3 = _Rules(split=_words(r"\p{N}{1,3}"), whole_words=True, add_bos=True)
_CL100K = _Rules(split=_words(r"\p{N}{1,3}"))
_QWEN2 = _Rules(split=_words(r"\p{N}"), nfc=True)
_TEKKEN = _Rules(split=_cased_words(r"\p{N}", ""), whole_words=True, add_bos=True)
_O200K = _Rules(split=_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))

# By `tokenizer.ggml.pre`.
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,  # OLMo 2, Phi 4
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,  # Qwen 3 too
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,  # Mistral since Nemo
    "gpt-4o": _O200K,  # Phi 4 mini
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind]


def gguf_tokenizer(file: GGUFFile) -> TokenizerFiles:
    metadata = Metadata(file)
    settings = metadata.below("tokenizer.ggml.")
    vocabulary = _vocabulary(settings)
    model = settings.string("model")
    with refuse_damage(file.path):
        if model == "gpt2":
            rules = _rules(settings)
            tokenizer, add_bos = _byte_level_bpe(settings, vocabulary, rules), rules.add_bos
        elif model == "llama":
            tokenizer, add_bos = _sentencepiece_bpe(settings, vocabulary), True
        else:
            raise UnsupportedModel(f"{file.path}: the tokenizer {model!r} is not supported, only gpt2 and llama")
        for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            special = kind != _USER_DEFINED  # a user-defined token is matched whole but is ordinary text
            tokenizer.add_tokens(
                [AddedToken(text, normalized=False, special=special) for text in vocabulary.of_type(kind)]
            )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: token_id(metadata, kind) for name, kind in names.items()}
    special_tokens = {name: vocabulary.tokens[i] for name, i in found.items() if i is not None}
    add_bos, add_eos = settings.boolean("add_bos_token", add_bos), settings.boolean("add_eos_token", False)
    add_special_tokens(
        tokenizer,
        bos=special_tokens.get("bos_token") if add_bos else None,
        eos=special_tokens.get("eos_token") if add_eos else None,
    )
    return tokenizer_files(tokenizer, metadata.string("tokenizer.chat_template"), special_tokens)


def _rules(settings: Metadata) -> _Rules:
    name = settings.string("pre") or "default"
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{settings.file.path}: the pre-tokenizer {name!r} is not supported; "
            f"supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return _PRE_TOKENIZERS[name]


def _vocabulary(settings: Metadata) -> _Vocabulary:
    path = settings.file.path
    tokens = settings.strings("tokens")
    if not tokens:
        corrupt(path, "it has no vocabulary (tokenizer.ggml.tokens)")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        corrupt(path, "the vocabulary has the same token twice")
    types = settings.numbers("token_type")
    if types is None:
        return _Vocabulary(tokens, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        corrupt(path, f"the vocabulary has {len(tokens)} tokens and {len(types)} token types")
    return _Vocabulary(tokens, types.tolist())


def _byte_level_bpe(settings: Metadata, vocabulary: _Vocabulary, rules: _Rules) -> Tokenizer:
    merges = [_split_merge(settings, merge) for merge in settings.strings("merges") or ()]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=rules.whole_words))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None)
    steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
    if rules.split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    if rules.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(settings: Metadata, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        corrupt(settings.file.path, f"tokenizer.ggml.merges has {merge!r:.60}, which is not two tokens")
    return left, right


def _sentencepiece_bpe(settings: Metadata, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: merges are implied by the scores of the pieces."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = token_id(settings.below(""), "unknown")
    tokenizer = Tokenizer(
        BPE(
            vocab=ids,
            merges=_implied_merges(settings, vocabulary),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        )
    )
    prefix = settings.boolean("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _implied_merges(settings: Metadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All pairs of pieces that join into a piece, best score first, ties in vocabulary order."""
    scores = settings.numbers("scores")
    if scores is None or len(scores) != len(vocabulary.tokens) or not np.isfinite(scores).all():
        corrupt(settings.file.path, "tokenizer.ggml.scores must have a number for every token")
    pieces = set(vocabulary.of_type(_NORMAL))
    merges: list[tuple[str, str]] = []
    for index in np.argsort(-scores.astype(np.float64), kind="stable"):
        piece = vocabulary.tokens[index]
        if piece not in pieces:
            continue
        if len(piece) > MAX_PIECE:
            corrupt(settings.file.path, f"token {index} has {len(piece)} characters, more than {MAX_PIECE}")
        merges += [
            (piece[:cut], piece[cut:])
            for cut in range(len(piece) - 1, 0, -1)
            if piece[:cut] in pieces and piece[cut:] in pieces
        ]
    return merges

"""Builds a tokenizer from GGUF metadata, which stores the vocabulary and only names the pre-tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile, corrupt
from chairlift.loading.gguf.metadata import Metadata, token_id
from chairlift.loading.gguf.pre_tokenizers import Rules, pre_tokenizer_name, pre_tokenizer_rules
from chairlift.loading.tokenizer import TokenizerFiles, add_special_tokens, refuse_damage, tokenizer_files

MAX_PIECE = 512  # characters; splitting a piece at every place is quadratic in its length
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types
_SPACE = "▁"


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
            rules = pre_tokenizer_rules(settings)
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
    ids = {name: token_id(metadata, kind) for name, kind in names.items()}
    special_tokens = {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}
    add_bos, add_eos = settings.boolean("add_bos_token", add_bos), settings.boolean("add_eos_token", False)
    add_special_tokens(
        tokenizer,
        bos=special_tokens.get("bos_token") if add_bos else None,
        eos=special_tokens.get("eos_token") if add_eos else None,
    )
    return tokenizer_files(tokenizer, metadata.string("tokenizer.chat_template"), special_tokens)


def describe_tokenizer(file: GGUFFile) -> str:
    """What the file says about its tokenizer, in words."""
    settings = Metadata(file, "tokenizer.ggml.")
    size = f"{len(settings.strings('tokens') or ()):,} tokens"
    if settings.string("model") == "llama":
        return f"SentencePiece BPE, {size}"
    how = f"pre-tokenizer {pre_tokenizer_name(settings)}"
    return f"byte-level BPE, {size}, {how if settings.string('pre') else f'{how}, since the file names none'}"


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


def _byte_level_bpe(settings: Metadata, vocabulary: _Vocabulary, rules: Rules) -> Tokenizer:
    merges = []
    for merge in settings.strings("merges") or ():
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            corrupt(settings.file.path, f"tokenizer.ggml.merges has {merge!r:.60}, which is not two tokens")
        merges.append((left, right))
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=rules.whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(rules.steps))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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

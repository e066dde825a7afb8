"""Tokenizers from GGUF metadata, compared with the library that made the vocabulary."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile
from chairlift.loading.gguf.tokenizer import gguf_tokenizer
from chairlift.loading.tokenizer import TokenizerFiles
from tests.loading.gguf_writing import finish

CORPUS = """The chairlift never stops for boarding: finished riders step off, waiting ones get on.
Lift 42 opened in 1987 and carries 2,400 riders per hour; it's the oldest, they'll tell you, isn't it?
def ride(lift, riders):\n    for rider in riders:\n        lift.board(rider)  # no padding\n    return lift
Schöne Grüße aus den Bergen! Où est la neige? Снег идёт. 雪が降っています。 The end of the line is the top.
"""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    gguf.TokenType[name] for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
)
TEXTS = st.text(st.one_of(st.sampled_from(sorted(set(CORPUS))), st.characters(exclude_categories=["Cs"])), max_size=40)


def _load(path: Path, edit: Callable[[GGUFWriter], Any]) -> TokenizerFiles:
    writer = GGUFWriter(path, "llama")
    edit(writer)
    finish(writer)
    return gguf_tokenizer(GGUFFile(path))


# SentencePiece


def _train(**settings: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines() * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _add_sentencepiece(writer: GGUFWriter, model: sentencepiece.SentencePieceProcessor) -> None:
    size = model.get_piece_size()
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([model.get_score(i) for i in range(size)])
    writer.add_token_types([_type_of(model, i) for i in range(size)])
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())


def _type_of(model: sentencepiece.SentencePieceProcessor, index: int) -> int:
    if model.is_unknown(index):
        return UNKNOWN
    if model.is_control(index):
        return CONTROL
    if model.is_byte(index):
        return BYTE
    return USER_DEFINED if model.id_to_piece(index) == "<tag>" else NORMAL


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TokenizerFiles]:
    model = _train()
    path = tmp_path_factory.mktemp("llama") / "x.gguf"
    return model, _load(path, lambda writer: _add_sentencepiece(writer, model))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TokenizerFiles]:
    """No space is put in front, and there is a user-defined token."""
    model = _train(add_dummy_prefix=False, user_defined_symbols=["<tag>"])

    def edit(writer: GGUFWriter) -> None:
        _add_sentencepiece(writer, model)
        writer.add_add_space_prefix(False)

    return model, _load(tmp_path_factory.mktemp("gemma") / "x.gguf", edit)


def _encode(files: TokenizerFiles, text: str) -> list[int]:
    return list(files.tokenizer.encode(text, add_special_tokens=False).ids)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS.filter(lambda text: "\0" not in text and "▁" not in text))
def test_sentencepiece_agrees(text: str, llama: Any, gemma: Any) -> None:
    for model, files in (llama, gemma):
        ids = _encode(files, text)
        assert ids == model.encode(text)
        assert files.tokenizer.decode(ids) == text


def test_sentencepiece_on_its_own_corpus(llama: Any, gemma: Any) -> None:
    for model, files in (llama, gemma):
        assert _encode(files, CORPUS) == model.encode(CORPUS)


def test_sentencepiece_specials(llama: Any, gemma: Any) -> None:
    model, files = llama
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<s>", "</s>", True)
    assert files.template_variables == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert files.tokenizer.encode("ride").ids == [model.bos_id(), *model.encode("ride")]
    assert _encode(files, "<s>ride</s>") == [model.bos_id(), *model.encode("ride"), model.eos_id()]
    model, files = gemma
    assert _encode(files, "a<tag>b") == model.encode("a<tag>b")
    assert files.tokenizer.decode(_encode(files, "a<tag>b</s>")) == "a<tag>b"  # user-defined is no special


def test_pieces_of_equal_score_merge_in_the_order_of_the_vocabulary(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b", "c", "bc", "ab"])
        writer.add_token_scores([-1000.0] * 5)
        writer.add_add_space_prefix(False)

    assert _encode(_load(tmp_path / "x.gguf", edit), "abc") == [0, 3]


# Byte-level BPE


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    """A byte-level vocabulary with the pre-tokenizer of SmolLM."""
    tokenizer = Tokenizer(BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=450,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return tokenizer


def _add_byte_level(writer: GGUFWriter, reference: Tokenizer, pre: str | None) -> None:
    vocabulary = sorted(reference.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(reference.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([CONTROL if index < 3 else NORMAL for _, index in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.fixture(scope="module")
def smollm(reference: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    path = tmp_path_factory.mktemp("smollm") / "x.gguf"
    return _load(path, lambda writer: _add_byte_level(writer, reference, "smollm"))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_byte_level_agrees(text: str, smollm: TokenizerFiles, reference: Tokenizer) -> None:
    ids = _encode(smollm, text)
    assert ids == reference.encode(text).ids
    assert smollm.tokenizer.decode(ids) == text


def test_byte_level_specials(smollm: TokenizerFiles) -> None:
    assert not smollm.add_bos
    assert smollm.chat_template is None
    ids = smollm.tokenizer.encode("<|im_start|>a<|im_end|>").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert smollm.tokenizer.decode(ids) == "a"
    assert smollm.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


SAMPLE = "I'M here'll  HelloWorld 12345½ x_y//\n\n é!\t"
SPLITS = {
    ("default", None): [
        *["I", "'", "M", " here", "'", "ll", " ", " HelloWorld", " ", "123", "45½", " x", "_", "y", "//"],
        *["\n\n", " é", "!", "\t"],
    ],
    ("gpt-2", "olmo"): [
        *["I", "'", "M", " here", "'ll", " ", " HelloWorld", " 12345½", " x", "_", "y", "//", "\n\n"],
        *[" é", "!", "\t"],
    ],
    ("smollm",): [
        *["I", "'", "M", " here", "'ll", " ", " HelloWorld", " ", "1", "2", "3", "4", "5", "½", " x", "_"],
        *["y", "//", "\n\n", " é", "!", "\t"],
    ],
    ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"): [
        *["I", "'M", " here", "'ll", " ", " HelloWorld", " ", "123", "45½", " x", "_y", "//\n\n", " é"],
        *["!", "\t"],
    ],
    ("qwen2", "deepseek-r1-qwen"): [
        *["I", "'M", " here", "'ll", " ", " HelloWorld", " ", "1", "2", "3", "4", "5", "½", " x", "_y"],
        *["//\n\n", " é", "!", "\t"],
    ],
    ("tekken",): [
        *["I", "'M", " here", "'ll", " ", " Hello", "World", " ", "1", "2", "3", "4", "5", "½", " x", "_y"],
        *["//\n\n", " é", "!", "\t"],
    ],
    ("gpt-4o",): [
        *["I'M", " here'll", " ", " Hello", "World", " ", "123", "45½", " x", "_y", "//\n\n", " é"],
        *["!", "\t"],
    ],
}


@pytest.mark.parametrize(("pre", "pieces"), [(pre, SPLITS[names]) for names in SPLITS for pre in names])
def test_every_pre_tokenizer_splits_as_its_family_does(
    pre: str | None, pieces: list[str], reference: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = _load(tmp_path / "x.gguf", lambda writer: _add_byte_level(writer, reference, pre)).tokenizer
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(SAMPLE)]
    assert [SAMPLE[start:end] for start, end in spans] == pieces


@pytest.mark.parametrize(("pre", "add_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_bos_is_added_where_the_family_or_the_file_says_so(
    pre: str, add_bos: bool, reference: Tokenizer, tmp_path: Path
) -> None:
    edit: Callable[[GGUFWriter], Any] = lambda writer: _add_byte_level(writer, reference, pre)  # noqa: E731
    files = _load(tmp_path / "x.gguf", edit)
    assert files.add_bos == add_bos
    assert files.tokenizer.encode("a").ids == [1] * add_bos + _encode(files, "a")

    def contrary(writer: GGUFWriter) -> None:
        edit(writer)
        writer.add_add_bos_token(not add_bos)

    assert _load(tmp_path / "y.gguf", contrary).add_bos != add_bos


def test_qwen_composes_characters_first(reference: Tokenizer, tmp_path: Path) -> None:
    files = _load(tmp_path / "x.gguf", lambda writer: _add_byte_level(writer, reference, "qwen2"))
    assert _encode(files, "e\N{COMBINING ACUTE ACCENT}") == _encode(files, "é")


def _replace(key: str, value: Any) -> Callable[[GGUFWriter], None]:
    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0][f"tokenizer.ggml.{key}"].value = value

    return edit


@pytest.mark.parametrize(
    ("edit", "error", "problem"),
    [
        (_replace("model", "rwkv"), UnsupportedModel, "'rwkv' is not supported"),
        (_replace("pre", "klingon"), UnsupportedModel, "'klingon' is not supported; supported are chatglm-bpe"),
        (_replace("merges", ["a b c", "ab"]), CorruptCheckpoint, "'ab', which is not two tokens"),
        (_replace("merges", ["a nothing"]), CorruptCheckpoint, "no tokenizer can be made"),
        (_replace("tokens", ["a", "b", "a"]), CorruptCheckpoint, "same token twice"),
        (_replace("token_type", [1, 1]), CorruptCheckpoint, "2 token types"),
        (_replace("model", "llama"), CorruptCheckpoint, "scores must have a number"),
        (lambda writer: writer.kv_data[0].pop("tokenizer.ggml.tokens"), CorruptCheckpoint, "no vocabulary"),
    ],
)
def test_a_bad_vocabulary_is_refused(
    edit: Callable[[GGUFWriter], Any], error: type[Exception], problem: str, reference: Tokenizer, tmp_path: Path
) -> None:
    def write(writer: GGUFWriter) -> None:
        _add_byte_level(writer, reference, "gpt-2")
        edit(writer)

    with pytest.raises(error, match=problem):
        _load(tmp_path / "x.gguf", write)


def test_a_piece_of_a_million_letters_takes_bounded_time(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "a" * 1_000_000])
        writer.add_token_scores([0.0, 0.0])

    with pytest.raises(CorruptCheckpoint, match="1000000 characters"):
        _load(tmp_path / "x.gguf", edit)

"""Incremental text equals text decoded at once, and no piece contains half a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from chairlift.text.detokenizer import PieceDetokenizer, WindowDetokenizer
from chairlift.text.tokenizer import Tokenizer
from tests.text import backends
from tests.text.backends import CORPUS

BYTEWISE = ["byte fallback, strip", "byte fallback"]


@cache
def pair(kind: str) -> tuple[Backend, Tokenizer]:
    backend = backends.ALL[kind]()
    return backend, Tokenizer(backend)


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.detokenizer(skip)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("kind", backends.ALL)
@pytest.mark.parametrize("text", [*CORPUS[:4], "", " ", "   x", "é", "the lifts never stopping", "👨‍👩‍👧 ok"])
def test_joined_pieces_equal_the_full_decode(kind: str, text: str) -> None:
    backend, tokenizer = pair(kind)
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == backend.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from([*backends.ALL]), skip=st.booleans())
def test_any_tokens_equal_the_full_decode(data: st.DataObject, kind: str, skip: bool) -> None:
    """Random ids: invalid bytes, special tokens, first-token rules and ids beyond the vocabulary."""
    backend, tokenizer = pair(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=40))
    text, expected = "".join(pieces(tokenizer, ids, skip)), backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected or kind == "byte level":
        assert text == expected


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(BYTEWISE))
def test_an_invalid_byte_leaves_the_characters_before_it(data: st.DataObject, kind: str) -> None:
    """A stream cannot equal the full decode here, which replaces a whole run of bytes for one invalid byte."""
    backend, tokenizer = pair(kind)
    likely = st.sampled_from([3 + byte for byte in "a€👍".encode()] + [260, 264, 269])
    ids = data.draw(st.lists(likely | st.integers(3, 258), max_size=20))
    expected, run = "", b""
    for token in ids:
        if token < 259:
            run += bytes([token - 3])
        else:
            expected += characters(run) + (backend.id_to_token(token) or "").replace("▁", " ")
            run = b""
    expected += characters(run)
    assert "".join(pieces(tokenizer, ids)) == (expected.removeprefix(" ") if "strip" in kind else expected)


def characters(run: bytes) -> str:
    """The valid characters of a run, and one replacement character for each other byte."""
    text = ""
    while run:
        length = next((n for n in range(1, 5) if decodes(run[:n])), 0)
        text += run[:length].decode() or "\ufffd"
        run = run[length or 1 :]
    return text


def decodes(run: bytes) -> bool:
    try:
        return len(run.decode()) == 1
    except UnicodeDecodeError:
        return False


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_are_replaced_as_the_full_decode_does(values: list[int]) -> None:
    backend, tokenizer = pair("byte level")
    byte_ids = [token for token in range(tokenizer.vocab_size) if len(backend.id_to_token(token) or "") == 1]
    ids = [byte_ids[value % len(byte_ids)] for value in values]
    assert "".join(pieces(tokenizer, ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", BYTEWISE)
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("e2 82 ac", "€"),
        ("f0 9f 91 8d f0 9f 8f bd", "👍🏽"),
        ("e2 82", "��"),
        ("ff", "�"),
        ("e2 82 ac ff", "€�"),  # here the backend writes four replacement characters
    ],
)
def test_byte_tokens_join_into_characters(kind: str, run: str, expected: str) -> None:
    backend, tokenizer = pair(kind)
    letter = tokenizer.token_id("b")
    assert letter is not None
    ids = [letter, *(3 + byte for byte in bytes.fromhex(run)), letter]
    assert "".join(pieces(tokenizer, ids)) == f"b{expected}b"
    if "€�" not in expected:
        assert backend.decode(ids) == f"b{expected}b"


def test_characters_are_emitted_as_soon_as_they_are_complete() -> None:
    _, tokenizer = pair("byte level")
    ids = tokenizer.encode("a👍b")
    assert len(ids) > 3
    shown = pieces(tokenizer, ids)
    assert [piece for piece in shown if piece] == ["a", "👍", "b"]
    assert shown[-1] == ""


def test_an_unfinished_character_waits_for_the_flush() -> None:
    _, tokenizer = pair("byte level")
    ids = tokenizer.encode("👍")[:-1]
    *shown, last = pieces(tokenizer, ids)
    assert shown == [""] * len(ids)
    assert last == "\ufffd"


@pytest.mark.parametrize("kind", ["byte level", *BYTEWISE, "unusual order"])
def test_endless_continuation_bytes_hold_nothing_back(kind: str) -> None:
    backend, tokenizer = pair(kind)
    token = (
        3 + 0x80
        if kind != "byte level"
        else next(t for t in range(tokenizer.vocab_size) if backend.decode([t]) == "\ufffd")
    )
    stream = tokenizer.detokenizer()
    shown = [stream.push(token) for _ in range(2000)]
    assert len("".join(shown)) >= 2000 - 16
    if kind == "unusual order":
        assert isinstance(stream, WindowDetokenizer)
        assert len(stream._before) + len(stream._pending) <= 32


def test_special_tokens_are_skipped_or_shown() -> None:
    _, tokenizer = pair("byte level")
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert "".join(pieces(tokenizer, ids, skip=True)) == "hi"
    assert "".join(pieces(tokenizer, ids, skip=False)) == "<|im_start|>hi<|im_end|>"
    assert "".join(pieces(tokenizer, tokenizer.encode("a<tool>▁ wide ▁b"))) == "a<tool>▁ wide ▁b"


@pytest.mark.parametrize("kind", backends.ALL)
def test_ids_beyond_the_vocabulary_add_nothing(kind: str) -> None:
    _, tokenizer = pair(kind)
    ids = tokenizer.encode("the lift")
    beyond = [10**6, tokenizer.vocab_size + 1]
    assert "".join(pieces(tokenizer, [*beyond, *ids, *beyond])) == "".join(pieces(tokenizer, ids))


@pytest.mark.parametrize(
    ("kind", "direct"),
    [(kind, kind not in ("word piece", "no decoder", "unusual order")) for kind in backends.ALL],
)
def test_only_unusual_decoders_need_a_window(kind: str, direct: bool) -> None:
    _, tokenizer = pair(kind)
    assert isinstance(tokenizer.detokenizer(), PieceDetokenizer if direct else WindowDetokenizer)

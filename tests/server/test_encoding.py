"""Encoding of large responses: in a thread, and in pieces."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.server.generation import reply
from chairlift.server.generation.reply import LARGE_BODY, MAX_DEPTH, PIECE, json_pieces
from chairlift.server.http.routes import _tokenize
from chairlift.server.openai.types import TokenizeRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.messages import Submit, ToEngine, Update
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME, ScriptedEngine, front_end
from tests.server.running_server import HTTP
from tests.tiny import byte_level_tokenizer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(value=VALUES, depth=st.integers(0, 5))
def test_pieces_are_the_encoded_value(value: object, depth: int) -> None:
    assert json.loads(b"".join(json_pieces(value, depth))) == value


def test_no_piece_is_large() -> None:
    vectors = {"data": [{"embedding": [0.5] * 10_000} for _ in range(20)]}
    tokens = {"choices": [{"logprobs": {"content": [{"token": "a", "top_logprobs": [{}] * 20}] * 5000}}]}
    for body in (vectors, tokens):
        assert json.loads(b"".join(json_pieces(body))) == body
        assert max(map(len, json_pieces(body))) < 5 * PIECE


def test_a_large_response_is_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def pieces(value: object, depth: int = MAX_DEPTH) -> Iterator[bytes]:
        threads.add(threading.current_thread().name)
        return json_pieces(value, depth)

    def answer(engine: ScriptedEngine, message: ToEngine) -> None:
        if isinstance(message, Submit):
            engine.publish(Update(message.request_id, text=texts.pop(), tokens=[5], finish_reason="length"))

    monkeypatch.setattr(reply, "json_pieces", pieces)
    expected_texts = ["small", "x" * LARGE_BODY]
    texts = expected_texts[::-1]
    with front_end(answer) as front:
        for expected in expected_texts:
            body = HTTP.post(f"{front.url}/v1/completions", json={"model": NAME, "prompt": "hello"}).json()
            assert body["choices"][0]["text"] == expected
            assert bool(threads) == (len(expected) >= LARGE_BODY)
    assert all(name.startswith("asyncio_") for name in threads)


def test_the_pieces_of_a_text_are_never_objects_at_once() -> None:
    """A text of 8 MiB took 7 GiB."""
    text, model = "a ü" * 20_000, ServedModel.create(NAME, Tokenizer(byte_level_tokenizer()))
    bodies = [TokenizeRequest(content=text, with_pieces=shown) for shown in (None, True)]
    tokens, count = _tokenize(bodies[0], model, None)
    tracemalloc.start()
    pieces, _ = _tokenize(bodies[1], model, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * count
    shown = json.loads(pieces)["tokens"]
    assert [piece["id"] for piece in shown] == json.loads(tokens)["tokens"]
    texts = [piece["piece"] if isinstance(piece["piece"], list) else [*piece["piece"].encode()] for piece in shown]
    assert bytes(byte for part in texts for byte in part).decode() == text

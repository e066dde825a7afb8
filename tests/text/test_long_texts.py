"""Texts that cannot fit are refused early, and long ones are encoded without blocking other threads."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import InvalidParameter
from chairlift.text.tokenizer import Tokenizer
from tests.tiny import CHATML, byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer(), chat_template=CHATML)


class CountingBackend:
    """Counts the characters that a backend encodes."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=400) | st.sampled_from(["the engine ", "boarding", " ", "€"]).map(lambda word: word * 60))
def test_a_text_that_fits_is_never_refused(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.encode(text, max_tokens=max(1, len(ids))) == ids


@pytest.mark.parametrize("text", ["x" * 10**6, "the engine " * 10**5, "€" * 10**6])
def test_a_text_that_cannot_fit_is_refused_without_encoding_all_of_it(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CountingBackend(TOKENIZER._backend)
    monkeypatch.setattr(TOKENIZER, "_backend", backend)
    with pytest.raises(InvalidParameter, match="prompt"):
        TOKENIZER.encode(text, max_tokens=1000)
    with pytest.raises(InvalidParameter, match="messages"):
        TOKENIZER.encode_chat([{"role": "user", "content": text}], max_tokens=1000)
    assert backend.characters < 2 * 16 * 1000 + 1


@pytest.mark.parametrize("work", ["encode", "chat", "decode"])
def test_other_threads_run_meanwhile(work: str) -> None:
    text = "a chairlift never stops for boarding " * 4000
    ids = TOKENIZER.encode(text)
    turns, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    jobs = {
        "encode": lambda: TOKENIZER.encode(text),
        "chat": lambda: TOKENIZER.encode_chat([{"role": "user", "content": text}]),
        "decode": lambda: TOKENIZER.decode(ids * 4),
    }
    thread = threading.Thread(target=count)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # the other thread now runs only if the GIL is released
    try:
        before = turns[0]
        jobs[work]()
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert after > before + 10


def test_token_bytes_join_to_the_text() -> None:
    for text in ("a € b", "<|im_start|>", "the engine\n"):
        assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()
    assert TOKENIZER.token_bytes(10**6) == b""
    assert max(len(TOKENIZER.token_bytes(token)) for token in range(320)) <= TOKENIZER.longest_token

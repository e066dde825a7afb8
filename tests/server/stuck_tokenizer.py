"""A front end whose tokenizer blocks on long texts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from chairlift.server.wire.limits import Limits
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP

PATH = "/v1/completions"
LONG_TEXT = "word " * 5000


@contextmanager
def stuck_on_long_texts(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, **options: Any
) -> Iterator[tuple[FrontEnd, threading.Event]]:
    """A front end whose tokenizer blocks on long texts until the event is set."""
    go_on = threading.Event()
    with front_end(limits=limits, **options) as front:
        encode = front.service.model.tokenizer.encode

        def slow(text: str, **options: Any) -> list[int]:
            if len(text) >= len(LONG_TEXT):
                assert go_on.wait(60)
                return [7]
            return encode(text, **options)

        monkeypatch.setattr(front.service.model.tokenizer, "encode", slow)
        try:
            yield front, go_on
        finally:
            go_on.set()


def post_prompt(front: FrontEnd, prompt: str) -> int:
    return HTTP.post(front.url + PATH, json={"model": NAME, "prompt": prompt}).status_code


def preparing(front: FrontEnd) -> int:
    return front.service.admission.num_preparing

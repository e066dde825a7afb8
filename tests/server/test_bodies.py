"""Large bodies are parsed only for admitted, connected clients, and not delayed by long texts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Response
from pydantic import BaseModel
from starlette.types import Message

from chairlift.server.http import bodies
from chairlift.server.process.engine_client import EngineState
from chairlift.server.wire.limits import Limits
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP, wait_for
from tests.server.stuck_tokenizer import LONG_TEXT, post_prompt, preparing, stuck_on_long_texts

PATH = "/v1/completions"
LARGE = {"model": NAME, "prompt": LONG_TEXT}


def post(front: FrontEnd, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(front.url + path, json=body)


class StuckParsers:
    """Parsers that block on every body until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun: list[int] = []
        parse = bodies._parse

        def slow(model: Any, body: bytes) -> Any:
            self.begun.append(len(body))
            assert self.go_on.wait(60)
            return parse(model, body)

        monkeypatch.setattr(bodies, "_parse", slow)


@contextmanager
def stuck_parsers(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> Iterator[tuple[FrontEnd, StuckParsers]]:
    parsers = StuckParsers(monkeypatch)
    with front_end(limits=limits) as front:
        try:
            yield front, parsers
        finally:
            parsers.go_on.set()


@contextmanager
def requests_in_flight(front: FrontEnd, count: int, path: str = PATH, **body: Any) -> Iterator[list[int]]:
    """Send `count` requests at once; yields their statuses, complete at exit."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(front, path, **body).status_code)) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    yield statuses
    for thread in threads:
        thread.join(60)


def test_only_bodies_of_admitted_requests_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_waiting=0, max_text_jobs=1)  # and 8 slots
    with stuck_parsers(monkeypatch, limits) as (front, parsers):
        with (
            requests_in_flight(front, 8, **LARGE) as statuses,
            requests_in_flight(front, 1, "/tokenize", prompt=LONG_TEXT) as texts,
        ):
            wait_for(lambda: preparing(front) == 8, "the slots to be reserved")
            wait_for(lambda: front.service.admission._text_jobs.total == 1, "the text job to be admitted")
            assert post(front, PATH, **LARGE).status_code == 429
            assert post(front, "/tokenize", prompt=LONG_TEXT).status_code == 429
            front.engine.state = EngineState.RESTARTING
            assert post(front, PATH, **LARGE).status_code == 503
            front.service.admission.draining = True
            assert post(front, "/tokenize", prompt=LONG_TEXT).status_code == 503
            front.engine.state, front.service.admission.draining = EngineState.READY, False
            parsers.go_on.set()
        assert (statuses, texts) == ([400] * 8, [200])  # too long for this model
        assert len(parsers.begun) == 9
        assert preparing(front) == front.service.admission._text_jobs.total == 0


def test_bodies_of_disconnected_clients_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_parsers(monkeypatch, Limits()) as (front, parsers):
        body = json.dumps(LARGE).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connections = [front.connect() for _ in range(5)]
        for connection in connections:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: preparing(front) == 5, "all requests to be admitted")
        for connection in connections:
            connection.close()
        wait_for(lambda: preparing(front) == 0, "their reservations to be released")
        parsers.go_on.set()
        assert post(front, PATH, **LARGE).status_code == 400  # after the abandoned bodies
        assert len(parsers.begun) == 3  # two that were being parsed, and this one
        assert not front.engine.received


def test_refusals_do_not_wait_for_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_on_long_texts(monkeypatch, Limits(max_waiting=0)) as (front, go_on):
        with requests_in_flight(front, 3, **LARGE) as statuses:
            wait_for(lambda: preparing(front) == 3, "the long requests to be admitted")
            assert post(front, PATH, **LARGE, n="many").status_code == 400
            assert post(front, PATH, model="another", prompt=LONG_TEXT).status_code == 404
            assert post(front, PATH, **LARGE, n=8).status_code == 429
            go_on.set()
        assert statuses == [200] * 3
        assert post_prompt(front, "short") == 200


class Anything(BaseModel):
    """A body with any fields."""


def test_a_client_that_disconnects_as_its_answer_is_ready_leaves_no_error() -> None:
    """The answer and the disconnect come in the same turn of the event loop."""
    app, now, problems = FastAPI(), asyncio.Event(), list[Any]()
    app.router.route_class = bodies.threaded_body_route(cast(Any, None))
    waiting, messages, sent = asyncio.Event(), [{"type": "http.request", "body": b"{}"}], list[Message]()

    @app.post("/")
    async def answer(body: Anything) -> Response:
        await asyncio.sleep(0)  # Until the watch for the disconnect has begun.
        waiting.set()
        await now.wait()
        return Response()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await now.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
        request = asyncio.create_task(app(scope, receive, send))
        await waiting.wait()
        now.set()
        await request
        await asyncio.sleep(0)

    asyncio.run(run())
    assert sent[0]["status"] == 200
    assert problems == []

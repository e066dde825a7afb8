"""Requests to an ASGI application in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from chairlift.server.batch.run import BatchResponse


async def call(app: FastAPI, path: str, body: bytes, state: dict[str, Any] | None = None) -> BatchResponse:
    """Send a POST request to an ASGI application; the client never disconnects. `state` is what the guards of a server
    would have found out about it."""
    state = {} if state is None else state
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "state": state,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    unread, sent = [body], list[Message]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # never completes: there is no disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    headers = {name.lower(): value for name, value in start["headers"]}
    request_id, content = headers.get(b"x-request-id", b"").decode(), b"".join(part.get("body", b"") for part in parts)
    usage = state.get("usage")  # that the handler has counted
    tokens = 0 if usage is None else usage.completion_tokens
    return BatchResponse(start["status"], request_id, content, b"retry-after" in headers, tokens)

"""The outer middleware: it names each request, and makes every error one that the client can read.

Both middlewares are plain ASGI applications, so that streams pass through without buffering.
"""

from __future__ import annotations

import logging
import re
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import is_full
from chairlift.server.anthropic.errors import MESSAGES_PATH, VERSION_HEADER, converting_send
from chairlift.server.wire.errors import as_api_error

log = logging.getLogger("chairlift.server")

# Clients join a base URL and a path in every way: without /v1, or with two slashes. The guards, the limits, the routes
# and the log all see the endpoint's own path, because it is replaced before any of them.
_UNDER_V1 = (
    *("/chat/completions", "/completions", "/responses", "/responses/compact", "/responses/input_tokens"),
    *("/messages", "/messages/count_tokens", "/embeddings", "/models", "/files", "/batches"),
)
_PATHS = frozenset(
    (
        *(f"/v1{path}" for path in _UNDER_V1),
        *("/v1/score", "/v1/rerank", "/v2/rerank", "/score", "/rerank", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/ping", "/version", "/metrics", "/dashboard"),
    )
)
# What follows is a name or an id, which may have slashes of its own.
_WITH_ID = re.compile(r"/+(?:v1/+)?(models|files|batches)/(.+)", re.DOTALL)


def endpoint_path(path: str) -> str:
    """Return the path of the endpoint that a client means; other paths are returned unchanged."""
    single = re.sub(r"/{2,}", "/", path)
    for known in (single, f"/v1{single}"):
        if known in _PATHS:
            return known
    if single == "/v1/health":
        return "/health"
    if found := _WITH_ID.fullmatch(path):
        return f"/v1/{found[1]}/{found[2]}"
    return path


class SentResponse:
    """The response to one request, as far as it was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.head: Message = {}  # empty: the client disconnected before there was a response
        self.is_complete = False

    @property
    def status(self) -> int | None:
        return self.head.get("status")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head = message
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)


class Observer(Protocol):
    """Writes down requests, such as the access log."""

    def begin(self, scope: Scope) -> Callable[[SentResponse], None]:
        """Return what is called when the response has ended, also if the client disconnected."""


class RequestBoundary:
    """Gives every layer the endpoint's own path and every response a request id; answers HEAD on every GET route, turns
    unexpected errors into 500s, and converts errors for Anthropic's clients."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Observer] = ()) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_request_id(dict(scope["headers"])) or f"req-{uuid.uuid4().hex}"
        scope = {**scope, "path": endpoint_path(scope["path"])}
        scope.setdefault("state", {})["request_id"] = request_id
        sent = SentResponse(send)
        endings = [observer.begin(scope) for observer in self._observers]
        try:
            await self._answer(scope, receive, sent.send, request_id)
        finally:
            for end in reversed(endings):
                end(sent)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        speaks_anthropic = MESSAGES_PATH.match(scope["path"]) or VERSION_HEADER in dict(scope["headers"])
        outgoing = converting_send(send) if speaks_anthropic else send
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await outgoing(message)

        # uvicorn omits the body of a response to HEAD.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._app(inner, receive, send_with_id)
        except ClientDisconnect:  # while its body was read, so it reads no answer
            pass
        except Exception as error:
            # Log the traceback without the error's message, which may quote a prompt.
            frames = "" if is_full(error) else "\n" + "".join(traceback.format_tb(error.__traceback__))
            log.error("%s in the request %s%s", type(error).__name__, request_id, frames)
            if not started:  # otherwise the response ends early and uvicorn closes the connection
                await as_api_error(error).response()(scope, receive, send_with_id)


def _client_request_id(headers: dict[bytes, bytes]) -> str | None:
    given = headers.get(b"x-request-id", b"").decode("ascii", "ignore")
    return given if 0 < len(given) <= 128 and given.isprintable() else None

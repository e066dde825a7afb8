"""What stands before every route: a request id, the API key, and a limit on the size of a body."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.serving.errors import APIError

OPEN_PATHS = frozenset({"/health"})


class Guards:
    """Plain ASGI, so that streams pass through untouched."""

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str], max_body_bytes: int) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _given_id(headers) or f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_id)
            return
        await self._app(scope, _Bounded(receive, self._max_body), send_with_id)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> APIError | None:
        if path not in OPEN_PATHS and self._digests and not self._knows(headers.get(b"authorization", b"")):
            problem = "missing or wrong API key; send it as 'Authorization: Bearer KEY'"
            return APIError(401, problem, type_="authentication_error", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            return too_large(self._max_body)
        return None

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, in constant time, whatever the first of them says.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than {limit} bytes", code="body_too_large")


class _Bounded:
    """Counts the body as it arrives, for clients that do not say its length, or lie."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = self._left = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise too_large(self._limit)
        return message


def _given_id(headers: dict[bytes, bytes]) -> str | None:
    given: Any = headers.get(b"x-request-id", b"").decode("ascii", "ignore")
    return given if 0 < len(given) <= 128 and given.isprintable() else None

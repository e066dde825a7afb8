"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

# On this code clients send the whole conversation instead of its last turn.
THREAD_UNSUPPORTED = "thread_unsupported_request"

# Anthropic's types by status; others are invalid requests below 500, and API errors above.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
# Codes of OpenAI's format that are Anthropic's too; clients look for them in `details`.
_DETAILS = frozenset({THREAD_UNSUPPORTED})
MESSAGES_PATH = re.compile(r"/+(v1/+)?messages")  # What follows may be anything.
VERSION_HEADER = b"anthropic-version"  # All of Anthropic's clients send it.


def is_messages_path(path: str) -> bool:
    return MESSAGES_PATH.match(path) is not None


def is_anthropic_client(scope: Scope) -> bool:
    return VERSION_HEADER in dict(scope["headers"])


def anthropic_error(status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Convert an error body of OpenAI's format. The parameter's name is in the message already, or put before it."""
    error = body["error"]
    type_ = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, parameter, code = error["message"], error["param"], error["code"]
    if parameter and parameter not in message:
        message = f"{parameter}: {message}"
    details = {"details": {"error_code": code}} if code in _DETAILS else {}
    return {"type": "error", "error": {"type": type_, "message": message, **details}, "request_id": request_id}


def converting_send(send: Send) -> Send:
    """Return a `send` that converts the errors of all layers, and adds the header `request-id` to every response."""
    return _ConvertingSend(send)


class _ConvertingSend:
    """An ASGI `send` that holds an error response back until it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # An error's.
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": _with_request_id(message["headers"])}
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)

    async def _send_error(self, start: Message) -> None:
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        found, body = dict(headers), self._body
        if found.get(b"content-type") == b"application/json":  # the refusal of an origin is plain text
            error = msgspec.json.decode(body)
            if error.get("type") != "error":  # a server behind an ingress has converted its own
                request_id = found.get(b"request-id", b"").decode("latin-1")
                body = msgspec.json.encode(anthropic_error(start["status"], error, request_id))
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})


def _with_request_id(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Add Anthropic's name of the request's id."""
    kept = [item for item in headers if item[0].lower() != b"request-id"]  # A server behind an ingress has added one.
    return [*kept, *((b"request-id", value) for name, value in kept if name.lower() == b"x-request-id")]

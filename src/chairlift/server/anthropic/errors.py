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


class ConvertingSend:
    """An ASGI `send` that converts the errors of all layers, each once it is complete, and adds the header `request-id`
    to every response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # An error's.
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # A server behind an ingress has added the header already.
            headers = [item for item in message["headers"] if item[0].lower() != b"request-id"]
            ids = [(b"request-id", value) for name, value in headers if name.lower() == b"x-request-id"]
            message = {**message, "headers": [*headers, *ids]}
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

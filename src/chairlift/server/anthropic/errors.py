"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"

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


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Convert an error body of OpenAI's format. The parameter's name is in the message already, or put before it."""
    error = body["error"]
    type_ = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, parameter = error["message"], error["param"]
    if parameter and parameter not in message:
        message = f"{parameter}: {message}"
    return {"type": "error", "error": {"type": type_, "message": message}}


class AnthropicErrors:
    """Middleware that converts the errors of all other layers for Anthropic's endpoints."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PATH):
            await self._app(scope, receive, _ConvertingSend(send))
        else:
            await self._app(scope, receive, send)


class _ConvertingSend:
    """An ASGI `send` that holds an error response back until it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # of an error
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)

    async def _send_error(self, start: Message) -> None:
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        body = self._body
        if dict(headers).get(b"content-type") == b"application/json":  # the refusal of an origin is plain text
            error = msgspec.json.decode(body)
            if error.get("type") != "error":  # a server behind an ingress has converted its own
                body = msgspec.json.encode(anthropic_error(start["status"], error))
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

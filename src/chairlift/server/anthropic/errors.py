"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

import re
from typing import Any

from starlette.types import Scope, Send

from chairlift.server.wire.errors import ConvertingSend

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


def _convert(status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    return body if body.get("type") == "error" else anthropic_error(status, body, request_id)


class AnthropicSend(ConvertingSend):
    """Adds the header `request-id` to every response."""

    def __init__(self, send: Send) -> None:
        super().__init__(send, _convert)

    def headers(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        # A server behind an ingress has added the header already.
        kept = [item for item in given if item[0].lower() != b"request-id"]
        return [*kept, *((b"request-id", value) for name, value in kept if name.lower() == b"x-request-id")]

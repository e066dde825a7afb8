"""The last events of a stream whose replica died, in the format of each API."""

from __future__ import annotations

import re

import msgspec

from chairlift.server.anthropic.errors import anthropic_error, is_messages_path
from chairlift.server.wire.errors import unavailable

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def error_events(path: str, before: bytes, request_id: str) -> bytes:
    """`before` are the last events of the stream."""
    error = unavailable("the replica that answered this request died; try again")
    if is_messages_path(path):
        return _event("error", anthropic_error(error.status_code, error.body, request_id))
    body = error.body["error"]
    if path.endswith("/responses"):
        numbers = _SEQUENCE_NUMBER.findall(before)
        number = int(numbers[-1]) + 1 if numbers else 0
        fields = {"type": "error", "code": body["type"], "message": body["message"], "param": None}
        return _event("error", fields | {"sequence_number": number})
    return b"data: " + msgspec.json.encode(error.body) + EVENT_END + DONE


def _event(name: str, fields: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(fields) + EVENT_END

"""The access log: one JSON line for each request, without prompts and outputs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Scope

from chairlift.errors import InvalidParameter
from chairlift.server.http.boundary import SentResponse

STANDARD_OUTPUT = Path("-")

log = logging.getLogger("chairlift.server")

_encoder = msgspec.json.Encoder()


class AccessLog:
    """Writes a line when a response has ended, also if the client disconnected."""

    def __init__(self, log: logging.Handler) -> None:
        self._handler = log

    def begin(self, scope: Scope) -> Callable[[SentResponse], None]:
        start, time_of_day = time.monotonic(), datetime.now(UTC)

        def end(sent: SentResponse) -> None:
            line = _line(scope, sent)
            line |= {"time": time_of_day.isoformat(timespec="milliseconds"), "seconds": time.monotonic() - start}
            self._write(line)

        return end

    def _write(self, line: dict[str, Any]) -> None:
        text = _encoder.encode(line).decode()
        self._handler.handle(logging.LogRecord("chairlift.access", logging.INFO, "", 0, text, None, None))


class _AccessLogHandler(logging.Handler):
    """Says that a line cannot be written, instead of printing a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it)
        log.error("cannot write the access log: %s", sys.exc_info()[1])


class _FileHandler(_AccessLogHandler, WatchedFileHandler):
    """Writes to a file, which is opened anew if it was moved by logrotate."""


class _OutputHandler(_AccessLogHandler, logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard output."""


def open_access_log(file: Path) -> logging.Handler:
    """Open the log; raise if it cannot be written."""
    if file == STANDARD_OUTPUT:
        return _OutputHandler(sys.stdout)
    try:
        return _FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("access_log", f"cannot write {str(file)!r}: {error.strerror}") from None


def _line(scope: Scope, sent: SentResponse) -> dict[str, Any]:
    state, client = scope["state"], scope.get("client")
    headers = dict(sent.head.get("headers", ()))
    line = {
        "request_id": headers.get(b"x-request-id", b"").decode("latin-1"),
        "client": client[0] if client else None,
        "trace_id": state.get("trace_id"),
        "tenant": state.get("tenant"),
        "method": scope["method"],
        "path": scope["path"],
        "status": sent.status,  # null: the client disconnected before there was a response
        "complete": sent.is_complete,  # whether all of the response was sent
    }
    usage = state.get("usage")
    return line if usage is None else line | usage.counts()

"""Output file of a batch: one response per line, so that an interrupted run can be resumed.

Each line is written in one call when its response is complete. A crash can therefore only truncate the last line, which
is removed at the next start; its request is then repeated.

Other processes may write parts of the output to files of their own (`shards.py`), which are moved here one by one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from chairlift.errors import ChairliftError, InvalidParameter, StorageFull, is_full
from chairlift.server.batch.input import BatchLine, LineSet

LOCK_RETRY_SECONDS = 0.1

# How a line with a response begins. Its body, which may have 100 MiB, is not parsed to find out whose response it is.
_RESPONSE = re.compile(
    rb'\{"id":"batch_req_[0-9a-f]{32}","custom_id":("[^"\\]*(?:\\.[^"\\]*)*"),"response":\{"status_code":(\d{3}),'
)


@dataclass(slots=True)
class BatchCounts:
    """How the lines of a run ended."""

    answered: int = 0
    failed: int = 0
    output_tokens: int = 0

    def add(self, status: int | None, output_tokens: int) -> None:
        """Count a response; `status` is None for an invalid line."""
        if status == 200:
            self.answered += 1
            self.output_tokens += output_tokens
        else:
            self.failed += 1

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(
            self.answered + other.answered, self.failed + other.failed, self.output_tokens + other.output_tokens
        )


class BatchOutput:
    """An output file, locked by one process. `done` is the set of lines with a response."""

    def __init__(self, path: Path, *, lock_timeout: float = 0.0) -> None:
        """`lock_timeout`: seconds to wait for another process that writes the file."""
        self.path = path
        self._writing = threading.Lock()
        try:
            # Not mode "a": a truncated line must be removed.
            self._file: IO[bytes] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
            self._lock(time.monotonic() + lock_timeout)
        except BlockingIOError:
            self._file.close()
            raise InvalidParameter("output", f"{str(path)!r} is being written by another process") from None
        except OSError as error:
            raise InvalidParameter("output", f"cannot write {str(path)!r} ({error.strerror})") from None
        try:
            self.done = self._recover()
        except BaseException:
            self.close()
            raise
        self._unsynced = False

    def _lock(self, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(LOCK_RETRY_SECONDS)

    def close(self) -> None:
        with self._writing:  # a thread may still write the response of a run that was cancelled
            self._file.close()

    def take_over(self, part: BatchOutput) -> BatchCounts:
        """Move the responses of another file here, except to lines that have one, and delete that file."""
        counts = BatchCounts()
        with part.path.open("rb") as lines:
            for data in lines:
                fields = _parse(data)
                assert fields is not None  # it was checked when the part was opened
                if not self.done.has(*_identity_of(fields)):
                    self._write_line(data)
                    self.done.add(*_identity_of(fields))
                    response = fields["response"] or {}
                    counts.add(response.get("status_code"), output_tokens(response.get("body")))
        self.sync()  # The only other copy is deleted below.
        part.path.unlink()
        part.close()
        return counts

    def write_response(self, line: BatchLine, status: int, request_id: str, body: bytes) -> None:
        """Write a response; `body` is JSON."""
        response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, _json(request_id), body)
        self._write(line, response, b"null")

    def write_problem(self, line: BatchLine) -> None:
        error = {"code": line.code, "message": line.problem, "line": line.number}
        self._write(line, b"null", _json(error))

    def _write(self, line: BatchLine, response: bytes, error: bytes) -> None:
        own_id, custom_id = _json(f"batch_req_{uuid.uuid4().hex}"), _json(line.custom_id)
        data = b'{"id":%b,"custom_id":%b,"response":%b,"error":%b}\n' % (own_id, custom_id, response, error)
        self._write_line(data)

    def _write_line(self, data: bytes) -> None:
        with self._writing:
            begin = self._file.tell()
            try:
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, "the disk is full")
            except OSError as problem:
                # Another line must not follow the part that was written.
                self._file.truncate(begin)
                self._file.seek(begin)
                if is_full(problem):
                    raise StorageFull(f"cannot write {str(self.path)!r}: the disk is full") from None
                raise ChairliftError(f"cannot write {str(self.path)!r} ({problem.strerror})") from None
            self._unsynced = True

    def sync(self) -> None:
        """Flush to disk, so that a power failure loses nothing."""
        if self._unsynced:
            self._unsynced = False
            os.fsync(self._file.fileno())

    def _recover(self) -> LineSet:
        """Read the responses of an earlier run and remove a truncated last line."""
        done, good, number = LineSet(), 0, 0
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for data in lines:
                number += 1
                identity = _identity(data)
                if identity is None:
                    if lines.read(1):
                        problem = f"line {number} of {str(self.path)!r} is no answer to a batch; give another file"
                        raise InvalidParameter("output", problem)
                    break
                done.add(*identity)
                good += len(data)
        self._file.truncate(good)
        self._file.seek(good)
        return done


def is_answered(data: bytes) -> bool:
    """Whether a line of an output file has a response with status 200."""
    if head := _RESPONSE.match(data):
        return head[2] == b"200"
    response = json.loads(data)["response"]
    return response is not None and response["status_code"] == 200


def _identity(data: bytes) -> tuple[str | None, int] | None:
    """The custom_id of a response, and the number of the line if it has none; None if this is no whole response."""
    if data.endswith(b"\n") and (head := _RESPONSE.match(data)):
        return json.loads(head[1]), 0
    fields = _parse(data)
    return None if fields is None else _identity_of(fields)


def _parse(data: bytes) -> dict[str, Any] | None:
    """Read a line of an output file; return None if it is truncated or something else."""
    try:
        fields: Any = json.loads(data) if data.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not {"custom_id", "response", "error"} <= set(fields):
        return None
    custom_id, number = _identity_of(fields)
    return fields if custom_id is not None or number else None


def _identity_of(fields: dict[str, Any]) -> tuple[str | None, int]:
    custom_id, error = fields["custom_id"], fields["error"]
    number = error.get("line") if isinstance(error, dict) else None
    return custom_id if isinstance(custom_id, str) else None, number if isinstance(number, int) else 0


def output_tokens(body: Any) -> int:
    """Return the output tokens in a response's usage, for the progress display."""
    usage = body.get("usage") if isinstance(body, dict) else None
    counts = [usage.get("completion_tokens"), usage.get("output_tokens")] if isinstance(usage, dict) else []
    return next((count for count in counts if isinstance(count, int)), 0)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()

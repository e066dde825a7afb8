"""Output file of a batch: one response per line, so that an interrupted run can be resumed.

Each line is written in one call when its response is complete. A crash can therefore only truncate the last line, which
is removed at the next start; its request is then repeated.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import IO, Any

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.batch.input import BatchLine, LineSet


class BatchOutput:
    """An output file, locked by one process. `done` is the set of lines with a response."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not mode "a": a truncated line must be removed.
            self._file: IO[bytes] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def close(self) -> None:
        self._file.close()

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
        try:
            if self._file.write(data) != len(data):
                raise OSError(0, "the disk is full")
        except OSError as problem:
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
                if not self._parse(data, done):
                    if lines.read(1):
                        problem = f"line {number} of {str(self.path)!r} is no answer to a batch; give another file"
                        raise InvalidParameter("output", problem)
                    break
                good += len(data)
        self._file.truncate(good)
        self._file.seek(good)
        return done

    def _parse(self, data: bytes, done: LineSet) -> bool:
        """Add the line of a response to `done`; return False if the response is truncated."""
        try:
            fields: Any = json.loads(data) if data.endswith(b"\n") else None
        except ValueError:
            return False
        if (
            not isinstance(fields, dict)
            or "custom_id" not in fields
            or not ("response" in fields and "error" in fields)
        ):
            return False
        custom_id, error = fields["custom_id"], fields["error"]
        number = error.get("line") if isinstance(error, dict) else None
        if not isinstance(custom_id, str) and not isinstance(number, int):
            return False
        done.add(custom_id, number or 0)
        return True


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()

"""Standard streams that are closed, full or no longer read, without tracebacks. Fast to import."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO

CLOSED_PIPE = 128 + signal.SIGPIPE  # the exit status of a program whose output is no longer read, as by `head`


def guard_streams() -> None:
    """Open the standard streams that are closed, and make errors of the others end the program in one line."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which no file or socket must have
    sys.stdin = sys.stdin or _opened(0, "r")
    sys.stdout = _guarded(sys.stdout, 1, _Output)
    sys.stderr = _guarded(sys.stderr, 2, _Diagnostics)


class _Output(TextIOWrapper):
    """Standard output. The program ends when it cannot be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._failure(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> SystemExit:
        _discard(self.fileno())
        if isinstance(error, BrokenPipeError):
            return SystemExit(CLOSED_PIPE)
        sys.stderr.write(f"error: cannot write to standard output: {error.strerror}\n")
        return SystemExit(1)


class _Diagnostics(TextIOWrapper):
    """Standard error. What cannot be written is lost, because there is no other place to say so."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            _discard(self.fileno())
            return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def _guarded(stream: TextIO | None, number: int, guard: type[TextIOWrapper]) -> TextIO:
    if stream is None:
        stream = _opened(number, "w")
    if not isinstance(stream, TextIOWrapper):  # a program that imports this has replaced it
        return stream
    stream.flush()
    errors = "replace" if guard is _Output else stream.errors  # what a terminal cannot show is printed as "?"
    encoding, lines, through = stream.encoding, stream.line_buffering, stream.write_through
    return guard(stream.detach(), encoding=encoding, errors=errors, line_buffering=lines, write_through=through)


def _opened(number: int, mode: str) -> TextIOWrapper:
    return TextIOWrapper(open(number, f"{mode}b", closefd=False), encoding="utf-8")


def _discard(number: int) -> None:
    """Let what is still written to a file descriptor, at the program's end for example, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)

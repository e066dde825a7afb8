"""Reading of batch files in OpenAI's format: one JSON request per line, each with a unique custom_id.

A line has the limits that the body of a request has. Its JSON is checked but no values are created, so that a thread
that reads a file holds the GIL for some milliseconds at a time; the server's application parses the request.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.http.bodies import ValueCounter
from chairlift.server.wire.limits import Limits

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_LINE_BYTES = Limits().max_body_bytes
MAX_LINE_VALUES = Limits().max_body_values
PIECE = 2**16  # bytes of a line whose values are counted at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_Fields = dict[str, msgspec.Raw]
_decode_fields = msgspec.json.Decoder(_Fields).decode


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line: a request, or the problem with it."""

    number: int  # counted from 1
    custom_id: str | None
    path: str = ""
    body: bytes = b""
    problem: str = ""  # empty if the line is a valid request
    code: str = ""


@dataclass(frozen=True, slots=True)
class LineRange:
    """Consecutive lines of a file."""

    first: int = 1  # number of the first line
    offset: int = 0  # The first line begins at this byte.
    count: int = sys.maxsize


WHOLE_FILE = (LineRange(),)


@dataclass(slots=True)
class LineSet:
    """A memory-efficient set of lines, identified by custom_id, or by number for lines without one."""

    ids: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)

    def add(self, custom_id: str | None, number: int) -> None:
        if custom_id is None:
            self.numbers.add(number)
        else:
            self.ids.add(_fingerprint(custom_id))

    def has(self, custom_id: str | None, number: int) -> bool:
        return number in self.numbers if custom_id is None else _fingerprint(custom_id) in self.ids

    def __len__(self) -> int:
        return len(self.ids) + len(self.numbers)

    def __le__(self, other: LineSet) -> bool:
        return self.ids <= other.ids and self.numbers <= other.numbers


def _fingerprint(custom_id: str) -> int:
    """Return a 64-bit hash: among ten million ids, two collide in one of 400,000 files."""
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def scan(
    path: Path, paths: Sequence[str] = PATHS, max_lines: int | None = None, ranges: Sequence[LineRange] = WHOLE_FILE
) -> LineSet:
    """Read the file once and return its lines; raises if a custom_id is used twice or if there are too many lines."""
    lines = LineSet()
    for line in read_lines(path, paths, ranges):
        if line.custom_id is not None and lines.has(line.custom_id, line.number):
            first = next(other.number for other in read_lines(path) if other.custom_id == line.custom_id)
            problem = f"line {line.number} of {str(path)!r} has the custom_id {line.custom_id[:100]!r} of line {first}"
            raise InvalidParameter("input", f"{problem} again; each must have its own")
        lines.add(line.custom_id, line.number)
        if max_lines is not None and len(lines) > max_lines:
            raise InvalidParameter("input", f"{str(path)!r} has more than {max_lines} lines")
    if not len(lines):
        raise InvalidParameter("input", f"{str(path)!r} has no lines in it")
    return lines


def read_lines(
    path: Path, paths: Sequence[str] = PATHS, ranges: Sequence[LineRange] = WHOLE_FILE
) -> Iterator[BatchLine]:
    """Iterate over the lines of a file without holding them all in memory. Empty lines are skipped, and requests to
    other paths than `paths` are invalid."""
    return (line for line, _ in locate_lines(path, paths, ranges))


def locate_lines(
    path: Path, paths: Sequence[str] = PATHS, ranges: Sequence[LineRange] = WHOLE_FILE
) -> Iterator[tuple[BatchLine, int]]:
    """Iterate over lines as `read_lines` does, each with the offset of its first byte."""
    try:
        with path.open("rb") as file:
            for part in ranges:
                file.seek(part.offset)
                number, offset, end = part.first, part.offset, part.first + part.count
                while number < end and (data := _read_line(file)):
                    if data.strip():
                        yield _parse(number, data, paths), offset
                    number, offset = number + 1, file.tell()
    except OSError as error:
        raise InvalidParameter("input", f"cannot read {str(path)!r} ({error.strerror})") from None


def _read_line(file: IO[bytes]) -> bytes:
    """Read a line, cut after MAX_LINE_BYTES + 1 bytes; the rest of it is skipped."""
    data = rest = file.readline(MAX_LINE_BYTES + 1)
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE_BYTES)
    return data


def _parse(number: int, data: bytes, paths: Sequence[str]) -> BatchLine:
    if len(data) > MAX_LINE_BYTES:
        return _invalid(number, None, "line_too_long", f"is longer than {MAX_LINE_BYTES} bytes")
    counter = ValueCounter()
    for start in range(0, len(data), PIECE):
        counter.feed(data[start : start + PIECE])
    if counter.count > MAX_LINE_VALUES:
        return _invalid(number, None, "too_many_values", f"has more than {MAX_LINE_VALUES} values")
    try:
        fields = _decode_fields(data.removeprefix(BYTE_ORDER_MARK))
    except msgspec.ValidationError:
        return _invalid(number, None, "invalid_line", "must be a JSON object")
    except (msgspec.DecodeError, RecursionError):
        return _invalid(number, None, "invalid_json", "is not valid JSON")
    custom_id = _text(fields.get("custom_id"))
    if not custom_id:
        return _invalid(number, None, "invalid_custom_id", "custom_id must be a string that is not empty")
    return _parse_fields(number, custom_id, fields, paths)


def _parse_fields(number: int, custom_id: str, fields: _Fields, paths: Sequence[str]) -> BatchLine:
    if unknown := sorted(set(fields) - {"custom_id", "method", "url", "body"}):
        return _invalid(number, custom_id, "invalid_line", f"unknown keys {', '.join(unknown)[:200]}")
    method, url, body = fields.get("method", msgspec.Raw(b'"POST"')), fields.get("url"), fields.get("body")
    if _text(method) != "POST":
        return _invalid(number, custom_id, "invalid_method", f"method must be POST, got {_shown(method)}")
    path = _text(url)
    if path not in paths:
        return _invalid(number, custom_id, "invalid_url", f"url must be one of {', '.join(paths)}, got {_shown(url)}")
    try:
        parameters = _decode_fields(body or b"null")
    except (msgspec.DecodeError, RecursionError):
        return _invalid(number, custom_id, "invalid_body", "body must be a JSON object")
    if bytes(parameters.get("stream", b"null")) not in (b"null", b"false"):
        return _invalid(
            number, custom_id, "invalid_body", "body must not ask for a stream: a batch is answered in whole"
        )
    assert path is not None
    assert body is not None
    return BatchLine(number, custom_id, path, bytes(body))


def _text(value: msgspec.Raw | None) -> str | None:
    """Return a JSON string; None for any other value."""
    try:
        return None if value is None else msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return None


def _shown(value: msgspec.Raw | None) -> str:
    """The beginning of a value, for an error."""
    return "nothing" if value is None else bytes(value)[:100].decode(errors="replace")


def _invalid(number: int, custom_id: str | None, code: str, problem: str) -> BatchLine:
    return BatchLine(number, custom_id, problem=f"line {number}: {problem}", code=code)


# ---- shards ----------------------------------------------------------------------------------------------------------
#
# Shards are parts of the input that several processes answer, each into a file of its own.
#
#     answers.jsonl                     responses so far; one process moves finished shards here
#     answers.jsonl.shards/RUN-3.jsonl  responses of shard 3, while a process writes them
#
# A run that ended early leaves the files of its last shards. The next run, with or without shards, first moves their
# responses to the output; the plan of shards then covers the lines that have none, so it may differ from run to run.

SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Shard:
    """Lines of the input without a response."""

    number: int  # counted from 1
    ranges: tuple[LineRange, ...]


def shard_folder(target: Path) -> Path:
    """The folder for the files of shards, beside the output."""
    return target.with_name(f"{target.name}.shards")


def shard_files(target: Path) -> list[Path]:
    """The files of shards that are not in the output yet."""
    return sorted(shard_folder(target).glob(f"*{SUFFIX}"))


def plan_shards(source: Path, done: LineSet, num_lines: int) -> Iterator[Shard]:
    """Divide the lines that are not in `done` into shards of `num_lines`; reads the input as needed."""
    number, count, ranges, is_open = 1, 0, list[LineRange](), False
    for line, offset in locate_lines(source):
        if done.has(line.custom_id, line.number):
            is_open = False
            continue
        if not is_open:
            ranges.append(LineRange(line.number, offset))
        ranges[-1] = replace(ranges[-1], count=line.number - ranges[-1].first + 1)  # It includes empty lines.
        count, is_open = count + 1, True
        if count == num_lines:
            yield Shard(number, tuple(ranges))
            number, count, ranges, is_open = number + 1, 0, [], False
    if ranges:
        yield Shard(number, tuple(ranges))

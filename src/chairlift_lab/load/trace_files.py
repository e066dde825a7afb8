"""Recorded traffic of real services: times, lengths and common prefixes, in the formats in which others publish it.

| file | columns or keys |
|---|---|
| CSV | TIMESTAMP, ContextTokens, GeneratedTokens: Azure's traces of 2023 and 2024 |
| JSON lines | `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: Mooncake's traces |
| | `arrival_time_ns`, `input_toks`, `output_toks`, `input_tok_ids`: LLMServingSim |
| | `event_type` and `request`, with `replay`: Dynamo's request trace |
| | `time`, `prompts`, `completions`: our own access log, which has measured times and targets as well |

Equal block ids stand for equal beginnings of prompts. A file may end in `.gz`.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.errors import InvalidParameter
from chairlift.options import read_text

HASHED_TOKENS = 512  # tokens that a block id stands for in Mooncake's traces
HASHED_TOKENS_OF_IDS = 16  # tokens of the blocks that a prompt is cut into where a trace has the tokens themselves
MAX_TRACE_MIB = 256  # some millions of requests
MAX_TRACE_BYTES = MAX_TRACE_MIB * 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """What a log says about the times of a request, in seconds from its arrival."""

    ttft: float
    e2e: float
    n_out: int

    @property
    def tpot(self) -> float | None:
        return (self.e2e - self.ttft) / (self.n_out - 1) if self.n_out > 1 else None


@dataclass(frozen=True, slots=True)
class TraceEntry:
    at: float  # seconds since the first request
    n_in: int
    n_out: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks, if the trace has them
    block_tokens: int = HASHED_TOKENS  # tokens of such a block
    tenant: str = ""
    targets: Targets = NO_TARGETS
    class_name: str = ""  # the class that they come from, if it has a name
    measured: Measured | None = None

    def scaled(self, lengths: float, speed: float) -> TraceEntry:
        """The same entry with scaled lengths (at least one token), `speed` times as fast."""
        n_in, n_out = (max(1, round(length * lengths)) for length in (self.n_in, self.n_out))
        return replace(self, at=self.at / speed, n_in=n_in, n_out=n_out)


def load_trace(path: Path, parameter: str = "trace") -> list[TraceEntry]:
    """All entries of a trace file, ordered by time; errors name `parameter`."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    read = _json_entries if suffix in (".jsonl", ".json", ".log") else _csv_entries
    file = StringIO(_text(path, parameter), newline="")
    try:
        entries = sorted(read(file), key=lambda entry: entry.at)
    except _BadLine as error:
        raise InvalidParameter(parameter, f"{error.where.format(repr(str(path)))}{error}") from None
    except csv.Error as error:
        raise InvalidParameter(parameter, f"cannot read {str(path)!r} ({error})") from None
    if not entries:
        raise InvalidParameter(parameter, f"{str(path)!r} has no requests in it")
    first, size = entries[0].at, _block_tokens(entries)
    return [replace(entry, at=entry.at - first, block_tokens=entry.block_tokens or size) for entry in entries]


def _text(path: Path, parameter: str) -> str:
    if path.suffix != ".gz":
        return read_text(path, parameter, MAX_TRACE_MIB)
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_TRACE_BYTES + 1)
        if len(data) > MAX_TRACE_BYTES:
            raise InvalidParameter(parameter, f"{str(path)!r} is larger than {MAX_TRACE_MIB} MiB")
        return data.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidParameter(parameter, f"cannot read {str(path)!r} ({error})") from None


def _block_tokens(entries: Sequence[TraceEntry]) -> int:
    """How many tokens a block id stands for: the power of two that fits the longest prompt. Some traces leave out the
    last block of a prompt if it is not full."""
    longest = max(entries, key=lambda entry: len(entry.blocks))
    return 2 ** round(math.log2(max(1, longest.n_in / len(longest.blocks)))) if longest.blocks else HASHED_TOKENS


class _BadLine(ValueError):
    """What is wrong with a line of a file; `where` has a place for the file's name."""

    def __init__(self, where: str, problem: object) -> None:
        super().__init__(str(problem))
        self.where = where


def _checked(at: float, n_in: int, n_out: int, **facts: Any) -> TraceEntry:
    if not abs(at) < float("inf") or n_in < 0 or n_out < 0:
        raise ValueError("times must be numbers and lengths not negative")
    # A request without an answer still cost its prompt; one token is the least that can be generated.
    return TraceEntry(at, max(n_in, 1), max(n_out, 1), **facts)


# ---- CSV ------------------------------------------------------------------------------------------------------------


def _csv_entries(file: Any) -> Iterator[TraceEntry]:
    rows = csv.DictReader(file)
    wanted = ("timestamp", "contexttokens", "generatedtokens")
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    if missing := [name for name in wanted if name not in names]:
        problem = f"has no column {', '.join(missing)}; a CSV needs TIMESTAMP, ContextTokens and GeneratedTokens"
        raise _BadLine("{} ", problem)
    time, n_in, n_out = (names[name] for name in wanted)
    for row in rows:
        try:
            yield _checked(_seconds(row[time]), int(row[n_in]), int(row[n_out]))
        except (TypeError, ValueError, AttributeError) as error:
            raise _BadLine(f"line {rows.line_num} of {{}}: ", error) from None


def _seconds(text: str) -> float:
    """A number of seconds, or a date with a time, which may have more digits than Python reads."""
    try:
        return float(text)
    except ValueError:
        parts = re.fullmatch(r"(.*?)(\.\d+)?(Z|[+-]\d\d:\d\d)?", text.strip())
        assert parts is not None  # it matches anything
        zone = (parts[3] or "+00:00").replace("Z", "+00:00")
        return datetime.fromisoformat(parts[1] + zone).timestamp() + float(parts[2] or 0)


# ---- JSON lines -----------------------------------------------------------------------------------------------------


def _json_entries(file: Iterable[str]) -> Iterator[TraceEntry]:
    blocks = BlockNumbers()
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row: Mapping[str, Any] = json.loads(line)
            read = next((read for key, read in FORMATS.items() if key in row), _mooncake)
            yield from read(row, blocks)
        except KeyError as error:
            raise _BadLine(f"line {number} of {{}} has no ", error) from None
        except (TypeError, ValueError, IndexError, AttributeError, InvalidParameter) as error:
            raise _BadLine(f"line {number} of {{}}: ", error) from None


class BlockNumbers:
    """Small numbers instead of the ids of blocks, which may be hashes: 0 for the first one in the file, and so on."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, ids: Iterable[Hashable]) -> tuple[int, ...]:
        return tuple(self._numbers.setdefault(each, len(self._numbers)) for each in ids)

    def of_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the full blocks of a prompt; equal ones have equal tokens back to the first."""
        numbers, parent = list[int](), -1
        for end in range(HASHED_TOKENS_OF_IDS, len(tokens) + 1, HASHED_TOKENS_OF_IDS):
            (parent,) = self.of([(parent, *tokens[end - HASHED_TOKENS_OF_IDS : end])])
            numbers.append(parent)
        return tuple(numbers)


def _mooncake(row: Mapping[str, Any], blocks: BlockNumbers) -> Iterator[TraceEntry]:
    """A request of Mooncake's traces; Dynamo's own tools write the same fields, also under these other names."""
    at, n_in, n_out = (
        row[other] if other in row else row[name]
        for name, other in (
            ("timestamp", "created_time"),
            ("input_length", "input_tokens"),
            ("output_length", "output_tokens"),
        )
    )
    numbers = blocks.of(map(int, row.get("hash_ids") or ()))
    yield _checked(at / 1000, int(n_in), int(n_out), blocks=numbers, block_tokens=0)


def _llmservingsim(row: Mapping[str, Any], blocks: BlockNumbers) -> Iterator[TraceEntry]:
    tokens = row.get("input_tok_ids") or ()
    if tokens and len(tokens) != row["input_toks"]:
        raise ValueError(f"input_toks is {row['input_toks']}, but there are {len(tokens)} input_tok_ids")
    facts = {"blocks": blocks.of_tokens(tokens), "block_tokens": HASHED_TOKENS_OF_IDS}
    yield _checked(row["arrival_time_ns"] * 1e-9, int(row["input_toks"]), int(row["output_toks"]), **facts)


def _llmservingsim_session(row: Mapping[str, Any], blocks: BlockNumbers) -> Iterator[TraceEntry]:
    raise ValueError("a session, whose later requests wait for earlier answers; only independent requests are read")


def _dynamo(row: Mapping[str, Any], blocks: BlockNumbers) -> Iterator[TraceEntry]:
    """An event of Dynamo's request trace; those about payloads and tools say nothing about the load."""
    if row["event_type"] != "request_end":
        return
    request = row["request"]
    replay = request.get("replay") or {}
    n_in, n_out = int(replay.get("input_length", request.get("input_tokens"))), int(request["output_tokens"])
    first, last = request.get("ttft_ms"), request.get("total_time_ms")
    measured = None if first is None or last is None else Measured(first / 1e3, last / 1e3, n_out)
    numbers = blocks.of(map(int, replay.get("input_sequence_hashes") or ()))
    size = int(replay["trace_block_size"]) if numbers else 0
    facts = {"blocks": numbers, "block_tokens": size, "measured": measured}
    yield _checked(request["request_received_ms"] / 1e3, n_in, n_out, **facts)


def _wrapped(row: Mapping[str, Any], blocks: BlockNumbers) -> Iterator[TraceEntry]:
    """Dynamo also writes its events as {"timestamp": …, "event": {…}}."""
    return _dynamo(row["event"], blocks)


def _access_log(row: Mapping[str, Any], blocks: BlockNumbers) -> Iterator[TraceEntry]:
    """A line of our access log; requests that were refused, or that do not generate, computed nothing."""
    targets = Targets.of_milliseconds(row["targets"]) if row.get("targets") else NO_TARGETS
    for completion in row.get("completions") or ():
        if not completion["tokens"]:
            continue
        prompt = row["prompts"][completion["prompt"]]
        times = (completion["ttft_ms"] / 1e3, completion["e2e_ms"] / 1e3)
        yield _checked(
            _seconds(row["time"]),
            int(prompt["tokens"]),
            int(completion["tokens"]),
            blocks=blocks.of(prompt["blocks"]),
            block_tokens=int(row["block_tokens"]),
            tenant=row.get("tenant") or "",
            targets=targets,
            class_name=row.get("class") or "",
            measured=Measured(*times, int(completion["tokens"])),
        )


Reader = Callable[[Mapping[str, Any], BlockNumbers], Iterator[TraceEntry]]
# By a key that only lines of this format have; all others are Mooncake's.
FORMATS: Mapping[str, Reader] = {
    "event_type": _dynamo,
    "event": _wrapped,
    "sub_requests": _llmservingsim_session,
    "input_toks": _llmservingsim,
    "method": _access_log,
}

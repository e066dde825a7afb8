"""Arrivals of an open loop, and recorded traffic of real services: times, lengths and common prefixes.

Two public formats are read: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's traces of 2023
and 2024), and JSON lines with timestamp (ms), input_length, output_length and hash_ids (those of Mooncake, of
LLMServingSim's recordings and of Dynamo), where equal ids stand for equal blocks of prompt tokens.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.options import read_text
from chairlift_lab.common.workload import BenchRequest

HASHED_TOKENS = 512  # tokens that a block id stands for in Mooncake's traces
MAX_TRACE_MIB = 256  # some millions of requests


@dataclass(frozen=True, slots=True)
class TraceEntry:
    at: float  # seconds since the first request
    n_in: int
    n_out: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks, if the trace has them
    block_tokens: int = HASHED_TOKENS  # tokens of such a block

    def scaled(self, lengths: float, speed: float) -> TraceEntry:
        """The same entry with scaled lengths (at least one token), `speed` times as fast."""
        n_in, n_out = (max(1, round(length * lengths)) for length in (self.n_in, self.n_out))
        return replace(self, at=self.at / speed, n_in=n_in, n_out=n_out)


def load_trace(path: Path) -> list[TraceEntry]:
    """All entries of a trace file, ordered by time."""
    read = _read_json_lines if path.suffix in (".jsonl", ".json") else _read_csv
    file = StringIO(read_text(path, "trace", MAX_TRACE_MIB), newline="")
    try:
        entries = sorted(read(file, path), key=lambda entry: entry.at)
    except csv.Error as error:
        raise InvalidParameter("trace", f"cannot read {str(path)!r} ({error})") from None
    if not entries:
        raise InvalidParameter("trace", f"{str(path)!r} has no requests in it")
    first, size = entries[0].at, _block_tokens(entries)
    return [replace(entry, at=entry.at - first, block_tokens=size) for entry in entries]


def _block_tokens(entries: Sequence[TraceEntry]) -> int:
    """How many tokens a block id stands for: the power of two that fits the longest prompt. Some traces leave out the
    last block of a prompt if it is not full."""
    longest = max(entries, key=lambda entry: len(entry.blocks))
    return 2 ** round(math.log2(longest.n_in / len(longest.blocks))) if longest.blocks else HASHED_TOKENS


def _read_csv(file: Any, path: Path) -> Iterator[TraceEntry]:
    rows = csv.DictReader(file)
    wanted = ("timestamp", "contexttokens", "generatedtokens")
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    if missing := [name for name in wanted if name not in names]:
        problem = f"has no column {', '.join(missing)}; a CSV needs TIMESTAMP, ContextTokens and GeneratedTokens"
        raise InvalidParameter("trace", f"{str(path)!r} {problem}")
    time, n_in, n_out = (names[name] for name in wanted)
    for row in rows:
        try:
            yield _checked(_seconds(row[time]), int(row[n_in]), int(row[n_out]))
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidParameter("trace", f"line {rows.line_num} of {str(path)!r}: {error}") from None


def _seconds(text: str) -> float:
    """A number of seconds, or a date with a time, which may have more digits than Python reads."""
    try:
        return float(text)
    except ValueError:
        parts = re.fullmatch(r"(.*?)(\.\d+)?(Z|[+-]\d\d:\d\d)?", text.strip())
        assert parts is not None  # it matches anything
        zone = parts[3] or "+00:00"
        return datetime.fromisoformat(parts[1] + zone).timestamp() + float(parts[2] or 0)


def _read_json_lines(file: Any, path: Path) -> Iterator[TraceEntry]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row: Mapping[str, Any] = json.loads(line)
            blocks = tuple(int(block) for block in row.get("hash_ids") or ())
            yield _checked(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), blocks)
        except KeyError as error:
            raise InvalidParameter("trace", f"line {number} of {str(path)!r} has no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidParameter("trace", f"line {number} of {str(path)!r}: {error}") from None


def _checked(at: float, n_in: int, n_out: int, blocks: tuple[int, ...] = ()) -> TraceEntry:
    if not abs(at) < float("inf") or n_in < 0 or n_out < 0:
        raise ValueError("times must be numbers and lengths not negative")
    # A request without an answer still cost its prompt; one token is the least that can be generated.
    return TraceEntry(at, max(n_in, 1), max(n_out, 1), blocks)


def trace_requests(
    vocabulary: Sequence[int], entries: Sequence[TraceEntry], *, seed: int, lengths: float = 1.0
) -> Iterator[BenchRequest]:
    """Prompts of the entries' lengths. Blocks with the same id have the same tokens; all else is different.

    `lengths` is what the entries were scaled by, and shortens the blocks too.
    """
    for index, entry in enumerate(entries):
        size, prompt = max(1, round(entry.block_tokens * lengths)), list[int]()
        for block in entry.blocks:
            prompt += random.Random(f"{seed} block {block}").choices(vocabulary, k=size)
        missing = entry.n_in - len(prompt)
        if missing > 0:
            prompt += random.Random(f"{seed} request {index}").choices(vocabulary, k=missing)
        yield BenchRequest(tuple(prompt[: entry.n_in]), entry.n_out)


ARRIVALS = ("poisson", "bursty", "uniform")
BURSTY = 0.25  # the default shape of bursty arrivals: gaps vary twice as much as those of a Poisson process


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests per second, and the shape of the gamma distribution of the gaps between them.

    The mean gap is 1 / rate for every shape; its coefficient of variation is 1 / √shape. A shape of 1 is a Poisson
    process, a smaller one is bursty, a larger one more even, and infinity gives equal gaps.
    """

    rate: float
    shape: float

    @classmethod
    def parse(cls, rate: float, kind: str, burstiness: float | None) -> Arrivals:
        if not 0 < rate < float("inf"):
            raise InvalidParameter("rate", f"must be a number of requests per second above 0, got {rate}")
        if kind not in ARRIVALS:
            raise InvalidParameter("arrivals", f"there is no {kind!r}; choose from {', '.join(ARRIVALS)}")
        if burstiness is not None and kind != "bursty":
            raise InvalidParameter("burstiness", "only goes with --arrivals bursty")
        if burstiness is not None and not 0 < burstiness < float("inf"):
            raise InvalidParameter("burstiness", f"must be above 0, got {burstiness}")
        shape = {"poisson": 1.0, "bursty": burstiness or BURSTY, "uniform": float("inf")}[kind]
        return cls(rate, shape)

    def times(self, seed: int) -> Iterator[float]:
        """Endless arrival times in seconds from the start; the first request arrives at once."""
        source = random.Random(f"arrivals {seed}")
        return accumulate(self._gaps(source), initial=0.0)

    def _gaps(self, source: random.Random) -> Iterator[float]:
        mean = 1 / self.rate
        while True:
            yield mean if self.shape == float("inf") else source.gammavariate(self.shape, mean / self.shape)

"""Shards of a batch: parts of the input that several processes answer, each into a file of its own.

    answers.jsonl                     responses so far; one process moves finished shards here
    answers.jsonl.shards/RUN-3.jsonl  responses of shard 3, while a process writes them

A run that ended early leaves the files of its last shards. The next run, with or without shards, first moves their
responses to the output; the plan of shards then covers the lines that have none, so it may differ from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.server.batch.input import LineRange, LineSet, locate_lines

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
    planned, number = _ShardPlan(), 0
    for line, offset in locate_lines(source):
        if done.has(line.custom_id, line.number):
            planned.end_range()
            continue
        planned.add(line.number, offset)
        if planned.num_lines == num_lines:
            number += 1
            yield Shard(number, planned.ranges())
            planned = _ShardPlan()
    if planned.num_lines:
        yield Shard(number + 1, planned.ranges())


class _ShardPlan:
    """The ranges of a shard while lines are added to it."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._ranges: list[LineRange] = []
        self._open: LineRange | None = None

    def add(self, number: int, offset: int) -> None:
        first = self._open or LineRange(number, offset, 0)
        self._open = LineRange(first.first, first.offset, number - first.first + 1)  # It includes empty lines.
        self.num_lines += 1

    def end_range(self) -> None:
        if self._open is not None:
            self._ranges.append(self._open)
            self._open = None

    def ranges(self) -> tuple[LineRange, ...]:
        self.end_range()
        return tuple(self._ranges)

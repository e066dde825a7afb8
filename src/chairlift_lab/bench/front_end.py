"""Streams of a stub engine through servers with different numbers of HTTP processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.model_shapes import TokenizerModel
from chairlift_lab.common.stub_engine import read_in_processes
from chairlift_lab.report.options import Count, Settings, number_list


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndSettings(Settings):
    streams: Annotated[Count, typer.Option(help="Concurrent streams.")] = 256
    tokens: Annotated[Count, typer.Option(help="Tokens of each stream.")] = 256
    rate: Annotated[
        float, at_least(1), typer.Option(help="Tokens per second that the engine generates for all streams.")
    ] = 20_000
    readers: Annotated[Count, typer.Option(help="Processes that read the streams.")] = 1
    model: TokenizerModel = DEFAULT_MODEL


def measure_front_end(settings: FrontEndSettings, workers: int) -> dict[str, Any]:
    """What a server with this number of HTTP processes delivered."""
    with _server(settings, workers) as url:
        totals = read_in_processes([(url, "")] * settings.readers, settings.streams, settings.tokens)
    tokens = settings.streams * settings.tokens
    return {
        "workers": workers,
        "tokens_per_s": tokens / totals.seconds,
        "events_per_s": totals.events / totals.seconds,
        "tokens_per_event": tokens / totals.events,
        "seconds": totals.seconds,
    }


@contextmanager
def _server(settings: FrontEndSettings, workers: int) -> Iterator[str]:
    arguments = ["serve", settings.model, f"{workers}", f"{settings.rate}"]
    command = [sys.executable, "-m", "chairlift_lab.common.stub_engine", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise ChairliftError("the server did not start")
        yield url
    finally:
        process.terminate()
        process.wait()


COLUMNS = (
    Column("HTTP\nprocesses", "workers"),
    Column("Tokens/s", "tokens_per_s", ",.0f"),
    Column("Events/s", "events_per_s", ",.0f"),
    Column("Tokens per\nevent", "tokens_per_event", ".2f"),
    Column("Seconds", "seconds", ".1f"),
)


@bench(
    "front-end",
    "chairlift bench front-end",
    "chairlift bench front-end --workers 1,4,8 --streams 1024 --rate 100000 --readers 4",
)
def bench_front_end(
    note: Note,
    settings: FrontEndSettings,
    workers: Annotated[Sequence[int], number_list("HTTP processes, one server for each number.")] = (1, 2),
) -> BenchResult:
    """Streams per second of the HTTP front end alone, with an engine that only counts.

    The engine adds one token to every stream in each of its steps, at a fixed
    rate, and needs hardly any time itself. A front end that cannot follow
    merges tokens into one event: then tokens per event are above 1.
    """
    rows = []
    for count in workers:
        if not 1 <= count <= 64:
            raise InvalidParameter("workers", f"must be from 1 to 64, got {count}")
        note(f"{count} HTTP processes")
        rows.append(measure_front_end(settings, count))
    described = asdict(settings)
    described["tokens_per_s"] = described.pop("rate")
    return BenchResult(described, rows, [Table("The HTTP front end", COLUMNS, rows)])

"""`chairlift bench front-end`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.lists import number_list

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
    workers: Annotated[Sequence[int], number_list("HTTP processes, one server for each number.")] = (1, 2),
    streams: Annotated[int, typer.Option(help="Concurrent streams.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 256,
    rate: Annotated[float, typer.Option(help="Tokens per second that the engine generates for all streams.")] = 20_000,
    readers: Annotated[int, typer.Option(help="Processes that read the streams.")] = 1,
    model: Annotated[str, typer.Option("--model", "-m", help="Model whose tokenizer is loaded.")] = DEFAULT_MODEL,
) -> BenchResult:
    """Streams per second of the HTTP front end alone, with an engine that only counts.

    The engine adds one token to every stream in each of its steps, at a fixed
    rate, and needs hardly any time itself. A front end that cannot follow
    merges tokens into one event: then tokens per event are above 1.
    """
    from chairlift_lab.bench.front_end.run import FrontEndSettings, measure_front_end

    for name, value in (("streams", streams), ("tokens", tokens), ("readers", readers), ("rate", rate)):
        if value < 1:
            raise InvalidParameter(name, f"must be at least 1, got {value}")
    settings = FrontEndSettings(model, streams, tokens, rate, readers)
    rows = []
    for count in workers:
        if not 1 <= count <= 64:
            raise InvalidParameter("workers", f"must be from 1 to 64, got {count}")
        note(f"{count} HTTP processes")
        rows.append(measure_front_end(settings, count).row())
    return BenchResult(asdict(settings), rows, [Table("The HTTP front end", COLUMNS, rows)])

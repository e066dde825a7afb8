"""`chairlift bench cold-start`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, ModelArgument
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.cold_start.run import ColdStart, ColdStartSettings, folder_with_tokenizer
from chairlift_lab.common.shape_options import ShapeOptions
from chairlift_lab.load.local_server import local_model_facts
from chairlift_lab.report.lists import number_list

COLUMNS = (
    Column("Start", "start"),
    Column("Streams", "streams"),
    Column("Ready\ns", "ready_seconds", ".1f"),
    Column("First\ntoken s", "first_token_seconds", ".1f"),
    Column("Requests", "requests", ","),
    Column("Failed", "failed", ","),
    Column("TTFT\np50 ms", "ttft_p50_ms", ",.1f"),
    Column("TTFT\np99 ms", "ttft_p99_ms", ",.1f"),
    Column("TTFT\nmax ms", "ttft_max_ms", ",.1f"),
    Column("TTFT p50\nat the end", "last_ttft_p50_ms", ",.1f"),
    Column("Tokens/s", "output_tokens_per_s", ",.0f"),
)


@bench(
    "cold-start",
    "chairlift bench cold-start",
    "chairlift bench cold-start --model-config qwen3-0.6b --device cuda --json result.json",
    "chairlift bench cold-start Qwen/Qwen3-0.6B --streams 1,8,32 --seconds 60",
)
def bench_cold_start(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    note: Note,
    model_argument: ModelArgument = None,
    streams: Annotated[Sequence[int], number_list("Requests in flight, each in a server of its own.")] = (1, 8, 32),
    seconds: Annotated[float, typer.Option(help="Seconds of load after /ready.")] = 60.0,
    prompt_len: Annotated[
        str, typer.Option(help="Tokens per prompt: a number or a range such as 100:400.")
    ] = "100:400",
    output_len: Annotated[str, typer.Option(help="Tokens per answer: a number or a range such as 100:400.")] = "100",
    seed: Annotated[int, typer.Option(help="Seed of lengths and prompts.")] = 0,
) -> BenchResult:
    """The first minute of a server whose kernels are not compiled yet.

    Every server is started with an empty kernel cache and loaded from the
    moment that /ready answers: the next request of a stream is sent when the
    last one has ended. The last server is started again with its kernels in
    the cache. Times to ready and to the first token are counted from the
    start of the process.
    """
    settings = ColdStartSettings(streams, seconds, prompt_len, output_len, seed)
    _ = settings.lengths  # raises if one is no range
    with _target(context, engine, shape, model_argument) as (model, options, name, vocabulary):
        rows = ColdStart(model, options, vocabulary, settings).run(note)
    tables = [Table(f"{name}: cold starts", COLUMNS, rows), phase_table(rows)]
    return BenchResult({"model": name} | asdict(settings) | {"engine": options}, rows, tables)


def phase_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Where the time until /ready went."""
    phases = [*dict.fromkeys(phase for row in rows for phase in row["phase_seconds"])]
    figures = [
        {"start": row["start"], "streams": row["streams"]}
        | {phase: row["phase_seconds"].get(phase) for phase in phases}
        | {"sum": sum(row["phase_seconds"].values()), "ready": row["ready_seconds"]}
        for row in rows
    ]
    columns = [Column(phase.replace("_", "\n"), phase, ".2f") for phase in (*phases, "sum", "ready")]
    title = "seconds of the engine's start, from the start of its process to ready"
    return Table(title, [Column("Start", "start"), Column("Streams", "streams"), *columns], figures)


@contextmanager
def _target(
    context: typer.Context, engine: EngineOptions, shape: ShapeOptions, argument: str | None
) -> Iterator[tuple[str, dict[str, Any], str, Sequence[int]]]:
    """The model to serve, its options, its display name and the token ids of prompts."""
    with shape.resolve(context, engine, argument) as (path, config, name):
        options = engine.config() | {"load_format": config.load_format}
        if config.load_format != "dummy":
            vocabulary, _ = local_model_facts(path, options, progress=not engine.quiet)
            yield path, options, name, vocabulary
            return
        with folder_with_tokenizer(path) as folder:
            yield folder, options, name, range(1, 1000)

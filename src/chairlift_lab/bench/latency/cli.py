"""`chairlift bench latency`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, ModelArgument, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.shape_options import ShapeOptions, ceilings_line, model_settings
from chairlift_lab.report.lists import number_list

COLUMNS = (
    Column("Requests", "batch"),
    Column("Prompt", "prompt_tokens", ","),
    Column("TTFT\np50 ms", "ttft_ms", ",.1f"),
    Column("TTFT\nlast ms", "last_ttft_ms", ",.1f"),
    Column("Floor\nms", "ttft_floor_ms", ",.1f"),
    Column("Of\nfloor", "ttft_share_of_floor", ".0%"),
    Column("TPOT\nms", "tpot_ms", ",.2f"),
    Column("Floor\nms", "tpot_floor_ms", ",.2f"),
    Column("Of\nfloor", "tpot_share_of_floor", ".0%"),
    Column("Tokens/s", "output_tokens_per_s", ",.0f"),
)


@bench(
    "latency",
    "chairlift bench latency",
    "chairlift bench latency Qwen/Qwen3-0.6B --batch 1 --prompt-tokens 128,2048 --output-tokens 128",
    "chairlift bench latency --model-config llama3-8b --device cuda --batch 1,8,32,128 --json result.json",
)
def bench_latency(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    note: Note,
    model_argument: ModelArgument = None,
    batch: Annotated[Sequence[int], number_list("Requests sent at once.")] = (1, 8, 32),
    prompt_tokens: Annotated[Sequence[int], number_list("Prompt lengths.")] = (128, 512),
    output_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 32,
    repeat: Annotated[int, typer.Option(help="Repetitions; the figures are medians.")] = 3,
) -> BenchResult:
    """Startup time, time to first token and time per output token, by batch size and prompt length.

    All requests of a row are sent at once: random tokens, greedy. The floor
    counts every weight once per step (of a mixture of experts, those of one
    token), every cached key and value once per token that reads it, and the
    arithmetic of the prompts, over the ceilings of this machine, measured in the
    same run.
    """
    from chairlift.engine.startup import load_engine
    from chairlift_lab.bench.latency.run import LatencySettings, measure_latency
    from chairlift_lab.bench.shapes.run import ShapeCase, model_cost, run_case
    from chairlift_lab.common.cpu_time import process_age
    from chairlift_lab.common.floor import ceilings_for

    settings = LatencySettings(batch, prompt_tokens, output_tokens, repeat)
    refuse_given(
        context, ("speculate", "draft_length"), "the floor counts a step for every token; see bench speculation"
    )
    with shape.resolve(context, engine, model_argument) as (path, config, name):
        note("loading")
        begun = time.perf_counter()
        started = load_engine(path, config, progress=not engine.quiet)
        run_case(started.engine, ShapeCase("first", [[1]], [1]), None, None)
        first_token = process_age() or time.perf_counter() - begun
        note("measuring the ceilings")
        ceilings = ceilings_for(started.runner.model)
        started.runner.capture_decodes()  # as a server does while idle
        points = measure_latency(started.engine, model_cost(started), ceilings, settings, note)
    rows = [point.row() for point in points]
    asked = {"batch": batch, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "repeat": repeat}
    title = f"{name}: first token {first_token:.1f} s after the start of the program"
    return BenchResult(
        asked | {"first_token_seconds": first_token} | model_settings(name, started.runner.model, ceilings),
        rows,
        [Table(title, COLUMNS, rows, ceilings_line(ceilings))],
    )

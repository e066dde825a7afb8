"""`chairlift bench latency`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import JsonOptions, parse_numbers, show_table, watch
from chairlift.lab.common.shape_options import ShapeOptions, ceilings_line, model_settings
from chairlift.terminal.options import EngineOptions, ModelArgument, refuse_given

if TYPE_CHECKING:
    from chairlift.lab.bench.latency.run import LatencyPoint

HEADINGS = (
    *("Requests", "Prompt"),
    *("TTFT\np50 ms", "TTFT\nlast ms", "Floor\nms", "Of\nfloor"),
    *("TPOT\nms", "Floor\nms", "Of\nfloor"),
    "Tokens/s",
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
    report: JsonOptions,
    model_argument: ModelArgument = None,
    batch: Annotated[str, typer.Option(help="Requests sent at once.")] = "1,8,32",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of their prompts.")] = "128,512",
    output_tokens: Annotated[int, typer.Option(help="Tokens that each generates.")] = 32,
    repeat: Annotated[int, typer.Option(help="Rounds; the figures are medians over them.")] = 3,
) -> None:
    """How long a user waits: from start to the first token, for a first token, and for each one after it.

    All requests of a line are sent at once, random tokens, greedy. The floor
    beside each figure counts every weight once per step (of a mixture of experts,
    those of one token), every cached key and value once per token that reads it,
    and the arithmetic of the prompts, over what this machine can do, measured in
    the same run.
    """
    from chairlift.engine.startup import load_engine
    from chairlift.lab.bench.latency.run import LatencySettings, measure_latency
    from chairlift.lab.bench.shapes.run import Case, model_cost, run_case
    from chairlift.lab.common.cpu_time import process_age
    from chairlift.lab.common.floor import ceilings_for

    settings = LatencySettings(
        parse_numbers("batch", batch), parse_numbers("prompt_tokens", prompt_tokens), output_tokens, repeat
    )
    refuse_given(
        context, ("speculate", "draft_length"), "the floor counts a step for every token; see bench speculation"
    )
    report.check()
    chosen = shape.resolve(context, engine, model_argument)
    with chosen as (path, config, name), watch(enabled=not engine.quiet) as note:
        note("loading")
        begun = time.perf_counter()
        started = load_engine(path, config, progress=not engine.quiet)
        run_case(started.engine, Case("first", [[1]], [1]), None, None)
        first_token = process_age() or time.perf_counter() - begun
        note("measuring what the machine can do")
        ceilings = ceilings_for(started.runner.model)
        points = measure_latency(started.engine, model_cost(started), ceilings, settings, note)
    show_table(
        f"{name}: first token {first_token:.1f} s after the start of the program",
        HEADINGS,
        [_cells(point) for point in points],
        ceilings_line(ceilings),
    )
    asked = {"batch": list(settings.batches), "prompt_tokens": list(settings.prompt_tokens)}
    more = {"output_tokens": output_tokens, "repeat": repeat, "first_token_seconds": first_token}
    report.write(
        "latency",
        asked | more | model_settings(name, started.runner.model, ceilings),
        [point.row() for point in points],
    )


def _cells(point: LatencyPoint) -> list[str]:
    row = point.row()
    return [
        f"{point.batch}",
        f"{point.prompt_tokens:,}",
        f"{row['ttft_ms']:,.1f}",
        f"{row['last_ttft_ms']:,.1f}",
        f"{row['ttft_floor_ms']:,.1f}",
        f"{point.ttft_share_of_floor:.0%}",
        f"{row['tpot_ms']:,.2f}",
        f"{row['tpot_floor_ms']:,.2f}",
        f"{point.tpot_share_of_floor:.0%}",
        f"{row['output_tokens_per_s']:,.0f}",
    ]

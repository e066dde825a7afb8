"""Time to first token and time per output token, by batch size and prompt length."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import Measurement, serve_at_once
from chairlift_lab.common.floor import Ceilings, ModelCost, floor_seconds
from chairlift_lab.common.model_shapes import WARM_UP_TOKENS, ShapeOptions, ceilings_line, model_settings
from chairlift_lab.report.options import Count, Counts, Settings, number_list

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

WARM_UPS = 2  # a prompt's step is captured when its shape occurs for the second time


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings(Settings):
    batch: Annotated[Counts, number_list("Requests sent at once.")] = (1, 8, 32)
    prompt_tokens: Annotated[Counts, number_list("Prompt lengths.")] = (128, 512)
    output_tokens: Annotated[int, at_least(2), typer.Option(help="Tokens per request.")] = 32
    repeat: Annotated[Count, typer.Option(help="Repetitions; the figures are medians.")] = 3


def measure_latency(
    engine: Engine, cost: ModelCost, ceilings: Ceilings, settings: LatencySettings, note: Note = lambda text: None
) -> list[dict[str, Any]]:
    """A row for each length and batch: medians over the repeats of requests that are sent at once."""
    rng = random.Random(0)

    def serve(batch: int, length: int, output: int) -> Measurement:
        prompts = [[rng.randrange(engine.vocab_size) for _ in range(length)] for _ in range(batch)]
        return serve_at_once(engine, prompts, [output] * batch)

    rows = []
    for length in settings.prompt_tokens:
        for batch in settings.batch:
            # What is compiled or captured on first use is no part of the figures.
            note(f"{batch} requests of {length} tokens: warm-up")
            for _ in range(WARM_UPS):
                serve(batch, length, WARM_UP_TOKENS)
            runs = []
            for turn in range(settings.repeat):
                note(f"{batch} requests of {length} tokens: {turn + 1} of {settings.repeat}")
                runs.append(serve(batch, length, settings.output_tokens))
            rows.append(_row(runs, length, settings.output_tokens, cost, ceilings))
    return rows


def _row(runs: Sequence[Measurement], length: int, output: int, cost: ModelCost, ceilings: Ceilings) -> dict[str, Any]:
    batch = len(runs[0].token_times)
    first_floor = floor_seconds([length] * batch, [1] * batch, cost, ceilings)
    whole_floor = floor_seconds([length] * batch, [output] * batch, cost, ceilings)
    first, last_first = (median(part(run.firsts) for run in runs) for part in (median, max))
    tpot = median(mean(run.lasts) - mean(run.firsts) for run in runs) / (output - 1)
    tpot_floor = (whole_floor - first_floor) / (output - 1)
    seconds = median(max(run.lasts) for run in runs)
    return {
        "name": f"{batch} requests of {length} tokens",
        "batch": batch,
        "prompt_tokens": length,
        "output_tokens": output,
        "ttft_ms": 1e3 * first,
        "last_ttft_ms": 1e3 * last_first,
        "ttft_floor_ms": 1e3 * first_floor,
        "ttft_share_of_floor": first_floor / last_first,
        "tpot_ms": 1e3 * tpot,
        "tpot_floor_ms": 1e3 * tpot_floor,
        "tpot_share_of_floor": tpot_floor / tpot,
        "e2e_ms": 1e3 * seconds,
        "output_tokens_per_s": batch * output / seconds,
    }


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
    settings: LatencySettings,
) -> BenchResult:
    """Startup time, time to first token and time per output token, by batch size and prompt length.

    All requests of a row are sent at once: random tokens, greedy. The floor
    counts every weight once per step (of a mixture of experts, those of one
    token), every cached key and value once per token that reads it, and the
    arithmetic of the prompts, over the ceilings of this machine, measured in the
    same run.
    """
    from chairlift.engine.startup import load_engine
    from chairlift_lab.common.floor import ceilings_for, model_cost
    from chairlift_lab.common.timing import process_age

    refuse_given(
        context, ("speculate", "draft_length"), "the floor counts a step for every token; see bench speculation"
    )
    with shape.resolve(context, engine) as (path, config, name):
        note("loading")
        start_time = time.perf_counter()
        started = load_engine(path, config, progress=not engine.quiet)
        serve_at_once(started.engine, [[1]], [1])
        first_token = process_age() or time.perf_counter() - start_time
        note("measuring the ceilings")
        ceilings = ceilings_for(started.runner.model)
        started.runner.capture_decodes()  # A server does this while idle.
        rows = measure_latency(started.engine, model_cost(started), ceilings, settings, note)
    title = f"{name}: first token {first_token:.1f} s after the start of the program"
    return BenchResult(
        asdict(settings) | {"first_token_seconds": first_token} | model_settings(name, started.runner.model, ceilings),
        rows,
        [Table(title, COLUMNS, rows, ceilings_line(ceilings))],
    )

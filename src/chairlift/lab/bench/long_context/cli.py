"""`chairlift bench long-context`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import JsonOptions, parse_numbers, show_table, watch
from chairlift.lab.common.shape_options import ShapeOptions, ceilings_line, model_settings
from chairlift.terminal.options import EngineOptions, ModelArgument, refuse_given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chairlift.lab.bench.long_context.run import LongContextPoint

HEADINGS = (
    *("Prompt", "Chunks"),
    *("Prefill\ns", "Floor\ns", "Of\nfloor"),
    *("KV cache\nMiB", "Peak more\nMiB"),
    *("TPOT\nms", "Floor\nms", "Of\nfloor", "KV times\nfloor, <="),
    *("Attention\nµs/layer", "Floor\nµs", "Times\nfloor"),
)


@bench(
    "long-context",
    "chairlift bench long-context --lengths 1024,4096",
    "chairlift bench long-context --model-config llama3-8b --device cuda --json result.json",
)
def bench_long_context(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    report: JsonOptions,
    model_argument: ModelArgument = None,
    lengths: Annotated[str, typer.Option(help="Prompt tokens, with commas between them.")] = "512,2048,8000",
    output_tokens: Annotated[int, typer.Option(help="Tokens generated after each prompt.")] = 64,
) -> None:
    """One long prompt at a time: how its time and memory grow, and what a token costs after it.

    A prompt is computed in chunks of --max-prefill-tokens. "Peak more" is the most
    memory in use beyond the weights and the KV cache: with ragged attention, which
    writes no score matrix, it hardly grows with the prompt. "KV times floor" counts
    all time of a step as attention but that in which its weights could be read, so it
    says little of short prompts. The last columns are the attention of one layer for
    one token by itself, beside the time in which the bandwidth measured in the same
    run brings its keys and values.
    """
    from chairlift.engine.machine_defaults import prefill_tokens
    from chairlift.engine.startup import load_engine
    from chairlift.lab.bench.long_context.run import LongContextSettings, made_longer, measure_long_contexts
    from chairlift.lab.common.floor import ceilings_for

    settings = LongContextSettings(parse_numbers("lengths", lengths), output_tokens)
    refuse_given(context, ("max_model_len", "max_batch_requests"), "follows from --lengths: one prompt at a time")
    refuse_given(context, ("prefix_caching",), "has no effect here: every prompt is new")
    refuse_given(context, ("speculate", "draft_length"), "the floor counts a step for every token")
    report.check()
    chosen = shape.resolve(context, engine, model_argument)
    with ExitStack() as files, watch(enabled=not engine.quiet) as note:
        path, config, name = files.enter_context(chosen)
        if config.load_format == "dummy":
            path = files.enter_context(made_longer(path, settings.longest))
        note("loading")
        config = replace(config, max_model_len=settings.longest, max_batch_requests=1, prefix_caching=False)
        try:
            started = load_engine(path, config, progress=not engine.quiet)
        except InvalidParameter as error:
            if error.parameter != "max_model_len":
                raise
            raise InvalidParameter("lengths", error.problem) from None
        note("measuring what the machine can do")
        ceilings = ceilings_for(started.runner.model)
        points = measure_long_contexts(started, ceilings, settings, note)
    show_table(name, HEADINGS, [_cells(point) for point in points], f"{_growth_line(points)}{ceilings_line(ceilings)}")
    asked = {"lengths": list(settings.lengths), "output_tokens": output_tokens, "chunk": prefill_tokens(config)}
    report.write(
        "long-context",
        asked | model_settings(name, started.runner.model, ceilings),
        [point.row() for point in points],
    )


def _cells(point: LongContextPoint) -> list[str]:
    attention, times = point.attention_seconds, point.attention_times_floor
    return [
        f"{point.tokens:,}",
        f"{point.chunks:,}",
        f"{point.prefill_seconds:,.3f}",
        f"{point.prefill_floor_seconds:,.3f}",
        f"{point.prefill_share_of_floor:.0%}",
        f"{point.kv_bytes / 2**20:,.1f}",
        "" if point.peak_bytes is None else f"{point.peak_bytes / 2**20:,.1f}",
        f"{1e3 * point.tpot_seconds:,.3f}",
        f"{1e3 * point.tpot_floor_seconds:,.3f}",
        f"{point.tpot_share_of_floor:.0%}",
        f"{point.kv_times_floor:.2f}x",
        "" if attention is None else f"{1e6 * attention:,.1f}",
        "" if attention is None else f"{1e6 * point.attention_floor_seconds:,.1f}",
        "" if times is None else f"{times:.2f}x",
    ]


def _growth_line(points: Sequence[LongContextPoint]) -> str:
    from chairlift.lab.common.timing import growth

    peaks = [point.peak_bytes for point in points if point.peak_bytes]
    lengths = [point.tokens for point in points]
    if len(peaks) < len(points) or len(set(lengths)) < 2:
        return ""
    return (
        f"Memory beyond weights and KV cache grows as the prompt's length to the power {growth(lengths, peaks):.2f}.\n"
    )

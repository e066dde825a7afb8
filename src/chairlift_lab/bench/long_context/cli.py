"""`chairlift bench long-context`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, ModelArgument, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.shape_options import ShapeOptions, ceilings_line, model_settings
from chairlift_lab.report.lists import number_list

COLUMNS = (
    Column("Prompt", "tokens", ","),
    Column("Chunks", "chunks", ","),
    Column("Prefill\ns", "prefill_seconds", ",.3f"),
    Column("Floor\ns", "prefill_floor_seconds", ",.3f"),
    Column("Of\nfloor", "prefill_share_of_floor", ".0%"),
    Column("KV cache\nMiB", "kv_bytes", ",.1f", factor=2**-20),
    Column("Peak more\nMiB", "peak_bytes", ",.1f", factor=2**-20, missing=""),
    Column("TPOT\nms", "tpot_seconds", ",.3f", factor=1e3),
    Column("Floor\nms", "tpot_floor_seconds", ",.3f", factor=1e3),
    Column("Of\nfloor", "tpot_share_of_floor", ".0%"),
    Column("KV times\nfloor, <=", "kv_times_floor", ".2f", unit="x"),
    Column("Attention\nµs/layer", "attention_seconds", ",.1f", factor=1e6, missing=""),
    Column("Floor\nµs", lambda row: _attention_floor(row), ",.1f", factor=1e6, missing=""),
    Column("Times\nfloor", "attention_times_floor", ".2f", unit="x", missing=""),
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
    note: Note,
    model_argument: ModelArgument = None,
    lengths: Annotated[Sequence[int], number_list("Prompt tokens.")] = (512, 2048, 8000),
    output_tokens: Annotated[int, typer.Option(help="Tokens generated after each prompt.")] = 64,
) -> BenchResult:
    """One long prompt at a time: prefill time, memory, and time per output token after it.

    A prompt is computed in chunks of --max-prefill-tokens. "Peak more" is the
    peak memory beyond the weights and the KV cache: ragged attention writes no
    score matrix, so it hardly grows with the prompt. "KV times floor" counts the
    whole step but the reading of weights as attention, which says little for
    short prompts. The last columns are the attention of one layer for one token,
    beside the time to read its keys and values at the bandwidth measured in the
    same run.
    """
    from chairlift.engine.settings import resolve_machine
    from chairlift.engine.startup import load_engine
    from chairlift_lab.bench.long_context.run import LongContextSettings, made_longer, measure_long_contexts
    from chairlift_lab.common.floor import ceilings_for

    settings = LongContextSettings(lengths, output_tokens)
    refuse_given(context, ("max_model_len", "max_batch_requests"), "follows from --lengths: one prompt at a time")
    refuse_given(context, ("prefix_caching",), "has no effect here: every prompt is new")
    refuse_given(context, ("speculate", "draft_length"), "the floor counts a step for every token")
    with ExitStack() as files:
        path, config, name = files.enter_context(shape.resolve(context, engine, model_argument))
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
        note("measuring the ceilings")
        ceilings = ceilings_for(started.runner.model)
        rows = [point.row() for point in measure_long_contexts(started, ceilings, settings, note)]
    asked = {"lengths": lengths, "output_tokens": output_tokens, "chunk": resolve_machine(config).max_prefill_tokens}
    return BenchResult(
        asked | model_settings(name, started.runner.model, ceilings),
        rows,
        [Table(name, COLUMNS, rows, _growth_line(rows) + ceilings_line(ceilings))],
    )


def _attention_floor(row: Mapping[str, Any]) -> float | None:
    return None if row["attention_seconds"] is None else row["attention_floor_seconds"]


def _growth_line(rows: Sequence[Mapping[str, Any]]) -> str:
    from chairlift_lab.common.timing import growth

    peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"]]
    lengths = [row["tokens"] for row in rows]
    if len(peaks) < len(rows) or len(set(lengths)) < 2:
        return ""
    return (
        f"Memory beyond weights and KV cache grows as the prompt's length to the power {growth(lengths, peaks):.2f}.\n"
    )

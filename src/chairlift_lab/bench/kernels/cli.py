"""`chairlift bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from chairlift.errors import UnsupportedModel
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, ModelArgument, engine_option_names, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.shape_options import ShapeOptions, ceilings_line, model_settings
from chairlift_lab.report.lists import number_list

# Engine options that change kernels.
RELEVANT = ("model", "device", "dtype", "quantization", "kv_dtype", "attention", "load_format", "quiet")
COLUMNS = (
    Column("Kernel", lambda point: point.name),
    Column("Batch", lambda point: point.size),
    Column("µs", lambda point: point.seconds, ",.1f", factor=1e6),
    Column("Floor µs", lambda point: point.floor_seconds, ",.1f", factor=1e6),
    Column("Of\nfloor", lambda point: point.share_of_floor, ".0%"),
    Column("GB/s", lambda point: point.work.bytes / point.seconds, ",.1f", factor=1e-9),
    Column("Of\nread", lambda point: point.share_of_bandwidth, ".0%"),
    Column("GFLOP/s", lambda point: point.work.flops / point.seconds or None, ",.1f", factor=1e-9, missing=""),
)


@bench(
    "kernels",
    "chairlift bench kernels",
    "chairlift bench kernels --quantization int8 --kernels products --rows 1,8,32",
    "chairlift bench kernels --kernels attention --kv-dtype bfloat16 --batch 32 --contexts 300",
    "chairlift bench kernels --model-config qwen3-0.6b --device cuda --batch 1,64,256 --json result.json",
)
def bench_kernels(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    note: Note,
    model_argument: ModelArgument = None,
    kernels: Annotated[str, typer.Option(help="Kinds of kernels, separated by commas.")] = (
        "products,attention,norms,sampling"
    ),
    rows: Annotated[Sequence[int], number_list("Rows of products and norms: tokens per step.")] = (1, 8, 32, 128, 512),
    batch: Annotated[Sequence[int], number_list("Requests, for attention and sampling.")] = (1, 8, 32),
    contexts: Annotated[Sequence[int], number_list("Context length of each request.")] = (128, 1024, 4096),
) -> BenchResult:
    """Each kernel of a model alone: time, bandwidth and arithmetic, next to the least possible time.

    The floor of a call is its memory traffic over the bandwidth or its
    arithmetic over the peak, whichever is longer, both measured in the same
    run. On a CPU, the call from Python is part of the time, for attention
    once for all layers; what kernels take
    within a step is shown by chairlift profile.
    """
    from chairlift.engine.settings import kv_dtype
    from chairlift.engine.startup import load_model
    from chairlift.models.decoder import Decoder
    from chairlift_lab.bench.kernels.run import KINDS, KernelSettings, measure_kernels
    from chairlift_lab.common.floor import ceilings_for
    from chairlift_lab.report.lists import parse_names

    settings = KernelSettings(parse_names("kernels", kernels, KINDS), rows, batch, contexts, engine.attention)
    others = [name for name in engine_option_names() if name not in RELEVANT]
    refuse_given(context, others, "has no effect on single kernels")
    with shape.resolve(context, engine, model_argument) as (path, config, name):
        note("loading")
        model = load_model(path, config, progress=not engine.quiet).model
        if not isinstance(model, Decoder):
            raise UnsupportedModel(f"{name} runs on the code of transformers, which has no kernels of ours")
        note("measuring the ceilings")
        ceilings = ceilings_for(model)
        points = measure_kernels(model, kv_dtype(config, model), ceilings, settings, note)
    asked = {
        "kernels": settings.kinds,
        "rows": settings.rows,
        "batch": settings.batches,
        "contexts": settings.contexts,
        "attention": settings.backend,
    }
    return BenchResult(
        asked | model_settings(name, model, ceilings),
        [point.row() for point in points],
        [Table(name, COLUMNS, points, ceilings_line(ceilings))],
    )

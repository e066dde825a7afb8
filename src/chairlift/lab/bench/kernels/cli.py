"""`chairlift bench kernels`."""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.errors import UnsupportedModel
from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import JsonOptions, parse_numbers, show_table, watch
from chairlift.lab.common.shape_options import ShapeOptions, ceilings_line, model_settings
from chairlift.terminal.options import EngineOptions, ModelArgument, engine_option_names, refuse_given

# The engine's that matter here.
_OPTIONS = (
    "model",
    "device",
    "dtype",
    "quantization",
    "kv_dtype",
    "attention",
    "load_format",
    "quiet",
)


@bench(
    "kernels",
    "chairlift bench kernels",
    "chairlift bench kernels --quantization int8 --kernels products --rows 1,8,32",
    "chairlift bench kernels --model-config qwen3-0.6b --device cuda --batch 1,64,256 --json result.json",
)
def bench_kernels(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    report: JsonOptions,
    model_argument: ModelArgument = None,
    kernels: Annotated[str, typer.Option(help="Which, with commas between them.")] = (
        "products,attention,norms,sampling"
    ),
    rows: Annotated[str, typer.Option(help="Rows of products and norms: tokens in a step.")] = "1,8,32,128,512",
    batch: Annotated[str, typer.Option(help="Requests, for attention and sampling.")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="Tokens that each of them sees.")] = "128,1024,4096",
) -> None:
    """The kernels of a model by themselves: time, bytes and arithmetic, next to the least time they could take.

    The floor of a call is what it reads and writes over the bandwidth, or its
    arithmetic over the arithmetic, both as measured in the same run, whichever
    takes longer. On a CPU, starting a call from Python is part of its time; what
    the kernels take inside a step is shown by chairlift profile.
    """
    from chairlift.engine.kv_dtype import kv_dtype
    from chairlift.engine.startup import load_model
    from chairlift.lab.bench.kernels.run import KernelSettings, measure_kernels
    from chairlift.lab.common.floor import ceilings_for
    from chairlift.models.decoder import Decoder

    settings = KernelSettings(
        kinds=[kind.strip() for kind in kernels.split(",")],
        rows=parse_numbers("rows", rows),
        batches=parse_numbers("batch", batch),
        contexts=parse_numbers("contexts", contexts),
        backend=engine.attention,
    )
    others = [name for name in engine_option_names() if name not in _OPTIONS]
    refuse_given(context, others, "has no effect on kernels by themselves")
    report.check()
    chosen = shape.resolve(context, engine, model_argument)
    with chosen as (path, config, name), watch(enabled=not engine.quiet) as note:
        note("loading")
        model = load_model(path, config, progress=not engine.quiet).model
        if not isinstance(model, Decoder):
            raise UnsupportedModel(f"{name} runs on transformers' code, whose kernels are not ours")
        note("measuring what the machine can do")
        ceilings = ceilings_for(model)
        points = measure_kernels(model, kv_dtype(config, model), ceilings, settings, note)
    show_table(
        name,
        ["Kernel", "Batch", "µs", "Floor µs", "Of floor", "GB/s", "GFLOP/s"],
        [
            [
                point.name,
                point.size,
                f"{1e6 * point.seconds:,.1f}",
                f"{1e6 * point.floor_seconds:,.1f}",
                f"{point.share_of_floor:.0%}",
                f"{point.work.bytes / point.seconds / 1e9:,.1f}",
                f"{point.work.flops / point.seconds / 1e9:,.1f}" if point.work.flops else "",
            ]
            for point in points
        ],
        ceilings_line(ceilings),
    )
    asked = {
        "kernels": settings.kinds,
        "rows": settings.rows,
        "batch": settings.batches,
        "contexts": settings.contexts,
        "attention": settings.backend,
    }
    report.write("kernels", asked | model_settings(name, model, ceilings), [point.row() for point in points])

"""`chairlift bench shapes`."""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.cli_bench_output import ReportOptions, show_table, watch
from chairlift.cli_options import with_option_groups
from chairlift.errors import InvalidParameter


@with_option_groups
def bench_shapes(
    report: ReportOptions,
    shape: Annotated[str, typer.Argument(help="qwen3-0.6b, llama3-8b, or the path of a config.json.")] = "qwen3-0.6b",
    cases: Annotated[str, typer.Option(help="decode-N, load-N and prefill-N, with commas between them.")] = (
        "decode-1,decode-8,decode-32,decode-128,load-256,prefill-64"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="auto, none, int8 (CPU) or fp8 (GPU).")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or fp8 (GPU).")] = "auto",
    seats: Annotated[int, typer.Option(help="Requests per step.")] = 256,
    scale: Annotated[int, typer.Option(help="Divide all lengths by this, for slow machines.")] = 1,
    cuda_graphs: Annotated[bool, typer.Option(help="On a GPU: capture steps and replay them.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Measure what bit-identical answers cost.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """How fast a model of this shape runs, next to the least time the device needs for it.

    Weights are random: speed depends on shapes, not on values, so nothing is
    fetched. The floor counts every weight once per step (of a mixture of experts,
    those of one token), every cached key and value once per token that reads it,
    and the arithmetic of the prompts, over the bandwidth and arithmetic measured
    on this device in the same run.
    """
    from chairlift.bench.shapes import plot_shapes, run_shape
    from chairlift.execution.config import EngineConfig

    if scale < 1:
        raise InvalidParameter("scale", f"must be at least 1, got {scale}")
    config = EngineConfig(
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        load_format="dummy",
        max_model_len=max(32, 4096 // scale),
        max_batch_requests=seats,
        max_batch_tokens=None if seats <= 256 else max(16384, seats),
        cuda_graphs=cuda_graphs,
        batch_invariant=batch_invariant,
    ).for_throughput()
    names = [name.strip() for name in cases.split(",")]
    report.check()
    with watch(enabled=not quiet) as note:
        results, ceilings, ready = run_shape(shape, config, names, note, scale=scale)
    show_table(
        f"{shape}, random weights: first token after {ready:.1f} s",
        ["Case", "Tokens/s", "Seconds", "Floor s", "Of floor", "Steps", "ms/step", "Host busy"],
        (
            [
                result.name,
                f"{result.tokens_per_second:,.0f}",
                f"{result.seconds:.3f}",
                f"{result.floor_seconds:.3f}",
                f"{result.share_of_floor:.0%}",
                f"{result.steps:,}",
                f"{1e3 * result.seconds / result.steps:.2f}",
                f"{result.host_seconds / result.seconds:.0%}",
            ]
            for result in results
        ),
        f"Ceilings here: {ceilings.bytes_per_second / 1e9:,.0f} GB/s, {ceilings.flops_per_second / 1e12:,.1f} TFLOP/s",
    )
    asked = {"shape": shape, "cases": names, "device": device, "dtype": dtype, "seats": seats, "scale": scale}
    asked |= {"batch_invariant": batch_invariant, "quantization": quantization, "kv_dtype": kv_dtype}
    asked |= {"ready_seconds": ready, "bytes_per_second": ceilings.bytes_per_second}
    asked |= {"flops_per_second": ceilings.flops_per_second}
    rows = [result.row() for result in results]
    report.write("shapes", asked, rows, lambda path, here: plot_shapes(path, shape, results, here))

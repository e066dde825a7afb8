"""`chairlift profile`: the time of a step by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chairlift.cli.app import UNDERSTAND, app
from chairlift.progress import watch
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import show_table
from chairlift_lab.common.model_shapes import ShapeOptions, model_settings
from chairlift_lab.report.options import JsonOptions, check_writable, machine, parse_numbers

if TYPE_CHECKING:
    from chairlift_lab.common.floor import Ceilings
    from chairlift_lab.profile.step_profile import BatchProfile, PartTime, Profiled


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift profile --quantization int8 --out trace.json",
        "chairlift profile Qwen/Qwen3-0.6B --batch 1,64 --prompt-tokens 512 --steps 64",
        "chairlift profile --model-config qwen3-0.6b --device cuda --batch 64 --out trace.json --json profile.json",
    ],
)
def profile(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    report: JsonOptions,
    batch: Annotated[str, typer.Option(help="Batch sizes to measure; each gets a table.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(help="Decode steps to measure for each batch.")] = 32,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev to this file.", show_default="none"),
    ] = None,
) -> None:
    """Show where the time of a decode step goes.

    On a CPU: matrix products, attention, sampling, the rest of the model, and
    Python, with the FLOP/s and bytes/s of each beside this machine's limits. On
    a GPU: kernels by kind, and the time in which the GPU is idle: between steps,
    and between the kernels of a step.

    Requests are random tokens, decoded greedily. Prompts are computed before
    the measured steps.
    """
    from chairlift.engine.settings import resolve_machine
    from chairlift.engine.startup import load_engine
    from chairlift_lab.profile.step_profile import ProfileSettings, profile_engine, write_trace

    settings = ProfileSettings(parse_numbers("batch", batch), prompt_tokens, steps)
    refuse_given(context, ("speculate", "draft_length"), "is not possible: plain decode steps are profiled")
    report.check()
    if out is not None:
        check_writable(out, "out")
    with (
        shape.resolve(context, engine) as (path, config, name),
        watch(enabled=not engine.quiet) as note,
    ):
        note("loading")
        started = load_engine(path, settings.with_slots(config), progress=not engine.quiet)
        profiled = profile_engine(started, settings, resolve_machine(config).max_prefill_tokens, note)
    _show(profiled, name)
    parameters = {"batch": list(settings.batches), "prompt_tokens": prompt_tokens, "steps": steps}
    parameters |= model_settings(name, started.runner.model, profiled.ceilings)
    if out is not None:
        write_trace(out, profiled.trace, parameters | {"machine": machine()})
        Console().print(f"Trace written to {out}: open it in ui.perfetto.dev", highlight=False)
    report.write("profile", parameters, [each.row() for each in profiled.batches])


def _show(profiled: Profiled, name: str) -> None:
    for batch in profiled.batches:
        requests = f"{batch.batch} requests, {batch.context:.0f} tokens each"
        show_table(
            f"{name}: {requests}: {1e3 * batch.step_seconds:.3f} ms per step",
            ["Part", "ms", "Share", "GFLOP/s", "of ceiling", "GB/s", "of ceiling"],
            [_cells(part, batch, profiled.ceilings) for part in batch.parts],
            _caption(batch, profiled.ceilings),
        )


def _cells(part: PartTime, whole: BatchProfile, ceilings: Ceilings) -> Sequence[str]:
    return [
        part.name,
        f"{1e3 * part.seconds:.3f}",
        f"{part.seconds / whole.step_seconds:.1%}",
        *_rate(part.flops_per_second, ceilings.flops_per_second),
        *_rate(part.bytes_per_second, ceilings.bytes_per_second),
    ]


def _rate(value: float | None, ceiling: float) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value / 1e9:,.1f}", f"{value / ceiling:.0%}")


def _caption(batch: BatchProfile, ceilings: Ceilings) -> str:
    lines = [
        f"{batch.steps} steps. Ceilings here: {ceilings.flops_per_second / 1e9:,.0f} GFLOP/s, "
        f"{ceilings.bytes_per_second / 1e9:,.1f} GB/s"
    ]
    if "idle_share" in batch.more:
        lines.append(_gpu_line(batch.more))
    return "\n".join(lines)


def _gpu_line(more: Any) -> str:
    return (
        f"Host gap between the kernels of consecutive steps: {more['host_gap_share']:.2%} of step time, without the "
        "profiler, by the GPU's clock.\n"
        f"The GPU is idle for {more['idle_share']:.1%} of a step with the profiler on; without it a step takes "
        f"{1e3 * more['step_seconds_without_profiler']:.3f} ms, at least "
        f"{more['idle_share_without_profiler']:.1%} of which are idle. The host works "
        f"{1e3 * more['host_seconds']:.3f} ms for a step, {1e3 * more['launch_call_seconds']:.3f} ms of it launching "
        f"{more['kernels_per_step']:.0f} kernels"
    )

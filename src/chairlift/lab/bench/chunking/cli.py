"""`chairlift bench chunking`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, parse_numbers, show_table, watch
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, refuse_given

_TRAFFIC = "Traffic"
_CHOSEN_HERE = (
    "budget",
    "target_tpot_ms",
    "target_ttft_ms",
    "max_batch_tokens",
    "max_prefill_tokens",
    "max_batch_requests",
    "kv_memory",
    "memory_share",
    "prefix_caching",
)


@bench(
    "chunking",
    "chairlift bench chunking",
    "chairlift bench chunking --targets-ms 100,200 --plot chunking.png",
)
def bench_chunking(
    context: typer.Context,
    engine: EngineOptions,
    report: ReportOptions,
    chunks: Annotated[
        str | None,
        typer.Option(help="Fixed chunk sizes, in tokens.", show_default="16 to 512 on a CPU, 128 to 4096 on a GPU"),
    ] = None,
    targets_ms: Annotated[
        str | None,
        typer.Option(help="Targets for the time per output token.", show_default="two that the machine suggests"),
    ] = None,
    decodes: Annotated[int, typer.Option(help="Requests that generate all the while.", rich_help_panel=_TRAFFIC)] = 8,
    start: Annotated[int, typer.Option(help="Tokens of their prompts.", rich_help_panel=_TRAFFIC)] = 32,
    output: Annotated[
        int, typer.Option(help="Tokens each generates before another takes its place.", rich_help_panel=_TRAFFIC)
    ] = 512,
    prompts: Annotated[int, typer.Option(help="Long prompts of each setting, in turns.", rich_help_panel=_TRAFFIC)] = 4,
    prompt_len: Annotated[int, typer.Option(help="Tokens of each.", rich_help_panel=_TRAFFIC)] = 1024,
    rounds: Annotated[int, typer.Option(help="Times that everything is run, with new engines.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_TRAFFIC)] = 0,
) -> None:
    """Long prompts arrive while others generate: fixed chunks against budgets that adapt.

    A target is met if the median of the inter-token times of those who
    generate is inside it, and their 99th percentile within 1.2 x of it. The
    throughput of an adaptive budget is compared with the highest of all fixed
    chunks that meet the same target by the same rule.
    """
    from chairlift.engine.machine_defaults import torch_device
    from chairlift.lab.bench.chunking.long_prompts import ChunkingSettings
    from chairlift.lab.bench.chunking.plot import plot_chunking
    from chairlift.lab.bench.chunking.run import CHUNKS, chunking_rows, sweep_chunks
    from chairlift.lab.common.engines import EngineMaker

    refuse_given(context, _CHOSEN_HERE, "this bench chooses it")
    settings = ChunkingSettings(
        decodes=decodes,
        start=start,
        output=output,
        prompts=prompts,
        prompt_len=prompt_len,
        rounds=rounds,
        seed=seed,
    )
    targets = None if targets_ms is None else [ms / 1e3 for ms in parse_numbers("targets_ms", targets_ms, float)]
    sizes = None if chunks is None else parse_numbers("chunks", chunks)
    report.check()
    show_log(quiet=True)
    with watch(enabled=not engine.quiet) as note:
        note(f"loading {engine.model}")
        maker = EngineMaker.load(engine.model, engine.config(), progress=not engine.quiet)
        sizes = sizes or list(CHUNKS[torch_device(maker.config()).type])
        points = sweep_chunks(maker, settings, chunks=sizes, targets=targets, note=note)
    rows = chunking_rows(points)
    show_chunking(rows)
    asked = maker.settings() | asdict(settings) | {"chunks": sizes}
    asked |= {"targets_ms": [row["target_ms"] for row in rows if row["target_ms"] is not None]}
    report.write("chunking", asked, rows, lambda path, here: plot_chunking(path, points, here))


def show_chunking(rows: Sequence[Mapping[str, Any]]) -> None:
    show_table(
        "Prompt chunks beside running requests",
        ["", "ITL\np50 ms", "ITL\np99 ms", "TTFT\np50 s", "Tokens\nper s", "Mean\nchunk", "Target met?\nOf best fixed"],
        (
            [
                row["name"],
                *(f"{row[key]:.3g}" for key in ("itl_p50_ms", "itl_p99_ms")),
                f"{row['ttft_p50_ms'] / 1e3:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['mean_chunk']:.0f}",
                _verdict(row),
            ]
            for row in rows
        ),
        "ITL: between tokens of running requests. TTFT: of the long prompts.\nTokens: prompts and outputs. Best "
        "fixed: the highest throughput\nof all fixed chunks that meet the same target",
    )


def _verdict(row: Mapping[str, Any]) -> str:
    if row["meets_target"] is None:
        return ""
    met = "yes" if row["meets_target"] else "no"
    return f"{met}, {row['throughput_vs_best_fixed']:.0%} of {row['best_fixed']}" if row["best_fixed"] else met

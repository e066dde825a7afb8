"""`chairlift bench chunking`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.chunking.options import ChunkingSettings
from chairlift_lab.report.lists import number_list
from chairlift_lab.report.options import ReportOptions

CHOSEN_HERE = (
    *("budget", "target_tpot_ms", "target_ttft_ms", "max_batch_tokens", "max_prefill_tokens"),
    *("max_batch_requests", "kv_memory", "memory_share", "prefix_caching"),
)
COLUMNS = (
    Column("", "name"),
    Column("ITL\np50 ms", "itl_p50_ms", ".3g"),
    Column("ITL\np99 ms", "itl_p99_ms", ".3g"),
    Column("TTFT\np50 s", "ttft_p50_ms", ".2f", factor=1e-3),
    Column("Tokens\nper s", "tokens_per_s", ",.0f"),
    Column("Mean\nchunk", "mean_chunk", ".0f"),
    Column("Target met?\nOf best fixed", lambda row: _verdict(row)),
)
CAPTION = (
    "ITL: between tokens of decoding requests. TTFT: of the long prompts.\nTokens: prompts and outputs. Best "
    "fixed: the highest throughput\nof all fixed chunks that meet the same target"
)


@bench(
    "chunking",
    "chairlift bench chunking",
    "chairlift bench chunking --targets-ms 100,200 --plot chunking.png",
    report=ReportOptions,
)
def bench_chunking(
    context: typer.Context,
    engine: EngineOptions,
    settings: ChunkingSettings,
    note: Note,
    chunks: Annotated[
        Sequence[int] | None,
        number_list("Fixed chunk sizes, in tokens.", default="16 to 512 on a CPU, 128 to 4096 on a GPU"),
    ] = None,
    targets_ms: Annotated[
        Sequence[float] | None,
        number_list("Targets for the time per output token.", kind=float, default="two, from the machine's speed"),
    ] = None,
) -> BenchResult:
    """Long prompts that arrive beside decoding requests: fixed chunks against adaptive token budgets.

    A target is met if the median inter-token time of the decoding requests is
    within it and the 99th percentile within 1.2 x of it. The throughput of an
    adaptive budget is compared with the highest of all fixed chunks that meet
    the same target by the same rule.
    """
    from chairlift.engine.settings import resolve_machine
    from chairlift_lab.bench.chunking.plot import plot_chunking
    from chairlift_lab.bench.chunking.run import CHUNKS, chunking_rows, sweep_chunks
    from chairlift_lab.common.engines import EngineMaker

    refuse_given(context, CHOSEN_HERE, "is chosen by this bench")
    targets = None if targets_ms is None else [ms / 1e3 for ms in targets_ms]
    maker = EngineMaker.from_options(engine, note)
    sizes = chunks or CHUNKS[resolve_machine(maker.config()).device.type]
    points = sweep_chunks(maker, settings, chunks=sizes, targets=targets, note=note)
    rows = chunking_rows(points)
    used = [row["target_ms"] for row in rows if row["target_ms"] is not None]
    return BenchResult(
        maker.settings() | asdict(settings) | {"chunks": sizes, "targets_ms": used},
        rows,
        [Table("Prompt chunks beside decoding requests", COLUMNS, rows, CAPTION)],
        lambda path, footnote: plot_chunking(path, points, footnote),
    )


def _verdict(row: Mapping[str, Any]) -> str:
    if row["meets_target"] is None:
        return ""
    met = "yes" if row["meets_target"] else "no"
    return f"{met}, {row['throughput_vs_best_fixed']:.0%} of {row['best_fixed']}" if row["best_fixed"] else met

"""`chairlift bench prefix`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.prefix.options import PrefixSettings
from chairlift_lab.report.lists import parse_names
from chairlift_lab.report.options import ReportOptions

COLUMNS = (
    Column("", "scenario"),
    Column("Caching", lambda row: "on" if row["prefix_caching"] else "off"),
    Column("Hit rate", "hit_rate", ".0%"),
    Column("TTFT\np50 ms", "ttft_p50_ms", ",.0f"),
    Column("TTFT\np95 ms", "ttft_p95_ms", ",.0f"),
    Column("Batch\nmean", "mean_batch_requests", ".1f"),
    Column("Batch\nmost", "peak_batch_requests"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
)
CAPTION = "Hit rate: share of the prompt tokens found in the cache. Batch: requests per step"


@bench(
    "prefix",
    "chairlift bench prefix",
    "chairlift bench prefix --scenarios agents --tools 1000 -q",
    report=ReportOptions,
)
def bench_prefix(
    context: typer.Context,
    engine: EngineOptions,
    settings: PrefixSettings,
    note: Note,
    scenarios: Annotated[str, typer.Option(help="Traffic to measure, separated by commas.")] = "chat,rag,agents",
) -> BenchResult:
    """Prefix caching on traffic with common prefixes: multi-turn chat, RAG documents and agents' tool lists.

    All conversations start at once and send the next message as soon as the
    previous answer is complete. The KV cache holds half of what all of them
    would need without sharing.
    """
    from chairlift_lab.bench.prefix.plot import plot_prefix
    from chairlift_lab.bench.prefix.run import SCENARIOS, compare_prefix_caching
    from chairlift_lab.common.engines import EngineMaker

    refuse_given(
        context, ("kv_memory", "memory_share", "max_batch_requests", "prefix_caching"), "is chosen by this bench"
    )
    chosen = parse_names("scenarios", scenarios, SCENARIOS)
    maker = EngineMaker.from_options(engine, note)
    points = compare_prefix_caching(maker, settings, scenarios=chosen, note=note)
    rows = [point.row() for point in points]
    return BenchResult(
        maker.settings() | asdict(settings) | {"scenarios": chosen},
        rows,
        [Table("Prefix caching", COLUMNS, rows, CAPTION)],
        lambda path, footnote: plot_prefix(path, points, footnote),
    )

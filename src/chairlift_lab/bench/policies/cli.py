"""`chairlift bench policies`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.progress import Note
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, VariedEngineOptions, bench
from chairlift_lab.bench.policies.options import PolicyWorkload
from chairlift_lab.report.lists import parse_names
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

TITLES = {"at-once": "All requests at once", "poisson": "Poisson arrivals"}
COLUMNS = (
    Column("Strategy", "strategy"),
    Column("Spread", "variation", "g"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
    Column("Useful\ntokens", "useful_token_share", ".0%"),
    Column("Latency\np50 s", "latency_p50_ms", ".2f", factor=1e-3),
    Column("Latency\np99 s", "latency_p99_ms", ".2f", factor=1e-3),
    Column("Batch\nmean", "mean_batch_requests", ".1f"),
)
CAPTION = "Spread: standard deviation / mean of the output lengths. Batch: requests per step"


@bench(
    "policies",
    "chairlift bench policies",
    "chairlift bench policies --strategies continuous,continuous/padded,static/padded --arrivals at-once",
    report=ReportOptions,
)
def bench_policies(
    context: typer.Context,
    engine: VariedEngineOptions,
    workload: PolicyWorkload,
    note: Note,
    strategies: Annotated[
        str, typer.Option(help="Batching policies, each alone or with an attention backend (static/padded).")
    ] = "continuous,dynamic,static",
    arrivals: Annotated[
        str, typer.Option(help="Arrivals: at-once, poisson or both.", rich_help_panel="Workload")
    ] = "at-once,poisson",
) -> BenchResult:
    """Batching policies on the same requests, for several variations of the output lengths.

    Requests arrive at once, where static and dynamic batching are the same, and
    as a Poisson process, where a static batch waits until it is full. Latency is
    from a request's arrival to its last token.
    """
    from chairlift_lab.bench.policies.plot import plot_policies
    from chairlift_lab.bench.policies.run import ARRIVALS, PoliciesSettings, Strategy, compare_policies
    from chairlift_lab.common.engines import EngineMaker

    refuse_given(context, ("policy", "attention"), "is compared by this bench; see --strategies")
    refuse_given(context, ("max_batch_requests",), "is called --concurrency here")
    refuse_given(context, ("prefix_caching",), "has no effect: the prompts of this bench have no common prefixes")
    settings = PoliciesSettings(
        strategies=[Strategy.parse(text) for text in strategies.split(",")],
        arrivals=parse_names("arrivals", arrivals, ARRIVALS),
        max_delay_ms=engine.max_delay_ms,
        **asdict(workload),
    )
    maker = EngineMaker.from_options(engine, note, max_delay_ms=None)
    points = compare_policies(maker, settings, note=note)
    rows = [point.row() for point in points]
    return BenchResult(
        maker.settings() | asdict(settings) | {"strategies": [str(each) for each in settings.strategies]},
        rows,
        _tables(rows),
        lambda path, footnote: plot_policies(path, points, footnote),
    )


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    return [
        Table(TITLES[kind], COLUMNS, [row for row in rows if row["arrivals"] == kind], CAPTION)
        for kind in dict.fromkeys(row["arrivals"] for row in rows)
    ]

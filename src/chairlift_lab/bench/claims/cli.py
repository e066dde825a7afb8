"""`chairlift bench claims`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.lists import number_list, parse_names
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from chairlift_lab.bench.claims.claim import ClaimVerdict

_COLOURS = {"yes": "green", "partly": "yellow", "no": "red"}


@bench(
    "claims",
    "chairlift bench claims",
    "chairlift bench claims --claims tiling,cache --plot claims.png",
    report=ReportOptions,
)
def bench_claims(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    claims: Annotated[str, typer.Option(help="Groups of claims to measure.", show_default="all")] = "",
    sizes: Annotated[Sequence[int], number_list("Prompt tokens for FlashAttention.")] = (
        *(512, 1024, 2048),
        *(4096, 8192, 16384),
    ),
    requests: Annotated[int, typer.Option(help="Requests for the batching policies.")] = 64,
) -> BenchResult:
    """Published claims about batching and attention, next to what is measured here.

    A claim that does not hold on this machine is shown with the reason. Takes
    about ten minutes on two cores.
    """
    from chairlift_lab.bench.claims.plot import plot_claims
    from chairlift_lab.bench.claims.run import GROUPS, ClaimsSettings, run_claims
    from chairlift_lab.common.engines import EngineMaker

    chosen_here = ("policy", "attention", "max_batch_requests", "prefix_caching", "max_delay_ms")
    refuse_given(context, chosen_here, "is chosen by this bench")
    groups = parse_names("claims", claims, GROUPS) if claims else list(GROUPS)
    default = ClaimsSettings()
    settings = replace(
        default,
        attention=replace(default.attention, tiling_sizes=sizes),
        policies=replace(default.policies, requests=requests),
    )
    maker = EngineMaker.from_options(engine, note)
    results = run_claims(maker, settings, groups=groups, note=note)
    return BenchResult(
        maker.settings() | {"claims": groups, "requests": requests, "tiling_sizes": sizes},
        [verdict.row() for verdict in results.verdicts],
        [ClaimsTable(results.verdicts)],
        lambda path, footnote: plot_claims(path, results, footnote),
    )


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """The claims with their sources, the measurement and the verdict."""

    verdicts: Sequence[ClaimVerdict]

    def show(self) -> None:
        table = Table(title="Published claims", title_justify="left", box=SIMPLE_HEAD, show_lines=True)
        for heading, ratio in (("Claim", 3), ("Source", 2), ("Measured here", 4), ("Holds?", 1)):
            table.add_column(heading, ratio=ratio)
        for verdict in self.verdicts:
            colour = _COLOURS[verdict.holds]
            why = "" if verdict.holds == "yes" else f"\n[dim]{verdict.why}[/dim]"
            holds = f"[{colour}]{verdict.holds}[/{colour}]"
            table.add_row(verdict.claim, verdict.source, verdict.measured + why, holds)
        Console().print(table)

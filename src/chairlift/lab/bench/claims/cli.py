"""`chairlift bench claims`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, parse_numbers, watch
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, refuse_given

if TYPE_CHECKING:
    from chairlift.lab.bench.claims.claim import Outcome

_COLOURS = {"yes": "green", "partly": "yellow", "no": "red"}


@bench(
    "claims",
    "chairlift bench claims",
    "chairlift bench claims --claims tiling,cache --plot claims.png",
)
def bench_claims(
    context: typer.Context,
    engine: EngineOptions,
    report: ReportOptions,
    claims: Annotated[
        str,
        typer.Option(help="Which to measure.", show_default="all"),
    ] = "",
    sizes: Annotated[str, typer.Option(help="Prompt tokens for FlashAttention.")] = "512,1024,2048,4096,8192,16384",
    requests: Annotated[int, typer.Option(help="Requests for the batching strategies.")] = 64,
) -> None:
    """What the field says about batching and attention, next to what is measured here.

    A claim that does not hold on this machine says so, and why. Takes about
    ten minutes on two cores.
    """
    from chairlift.lab.bench.claims.plot import plot_claims
    from chairlift.lab.bench.claims.run import GROUPS, ClaimsSettings, parse_groups, run_claims
    from chairlift.lab.common.engines import EngineMaker

    chosen_here = ("policy", "attention", "max_batch_requests", "prefix_caching", "max_delay_ms")
    refuse_given(context, chosen_here, "this bench compares several")
    groups = parse_groups(claims) if claims else list(GROUPS)
    default = ClaimsSettings()
    settings = replace(
        default,
        attention=replace(default.attention, tiling_sizes=parse_numbers("sizes", sizes)),
        policies=replace(default.policies, requests=requests),
    )
    report.check()
    show_log(quiet=True)
    with watch(enabled=not engine.quiet) as note:
        note(f"loading {engine.model}")
        maker = EngineMaker.load(engine.model, engine.config(), progress=not engine.quiet)
        results = run_claims(maker, settings, groups=groups, note=note)
    show_claims(results.outcomes)
    asked: dict[str, Any] = maker.settings() | {"claims": groups, "requests": requests}
    asked["tiling_sizes"] = settings.attention.tiling_sizes
    rows = [outcome.row() for outcome in results.outcomes]
    report.write("claims", asked, rows, lambda path, here: plot_claims(path, results, here))


def show_claims(outcomes: Sequence[Outcome]) -> None:
    table = Table(title="The field's claims", title_justify="left", box=SIMPLE_HEAD, show_lines=True)
    for heading, ratio in (("Claim", 3), ("Source", 2), ("Measured here", 4), ("Holds?", 1)):
        table.add_column(heading, ratio=ratio)
    for outcome in outcomes:
        colour = _COLOURS[outcome.holds]
        why = "" if outcome.holds == "yes" else f"\n[dim]{outcome.why}[/dim]"
        table.add_row(outcome.claim, outcome.source, outcome.measured + why, f"[{colour}]{outcome.holds}[/{colour}]")
    Console().print(table)

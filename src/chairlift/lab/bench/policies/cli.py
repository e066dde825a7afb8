"""`chairlift bench policies`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, parse_numbers, show_table, watch
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, refuse_given

if TYPE_CHECKING:
    from chairlift.lab.bench.policies.run import PolicyPoint

_WORKLOAD = "Workload"


@bench(
    "policies",
    "chairlift bench policies",
    "chairlift bench policies --strategies continuous,continuous/padded,static/padded --arrivals at-once",
)
def bench_policies(
    context: typer.Context,
    engine: EngineOptions,
    report: ReportOptions,
    strategies: Annotated[
        str, typer.Option(help="What to compare: policies, each alone or with an attention mode (static/padded).")
    ] = "continuous,dynamic,static",
    arrivals: Annotated[
        str, typer.Option(help="How requests come: at-once, or one by one (poisson).", rich_help_panel=_WORKLOAD)
    ] = "at-once,poisson",
    variations: Annotated[
        str,
        typer.Option(help="How much output lengths vary: standard deviation / mean.", rich_help_panel=_WORKLOAD),
    ] = "0.2,0.6,1.2",
    requests: Annotated[int, typer.Option(help="How many.", rich_help_panel=_WORKLOAD)] = 64,
    prompt: Annotated[int, typer.Option(help="Mean prompt tokens.", rich_help_panel=_WORKLOAD)] = 24,
    output: Annotated[int, typer.Option(help="Mean output tokens.", rich_help_panel=_WORKLOAD)] = 20,
    concurrency: Annotated[int, typer.Option(help="Requests per step.", rich_help_panel=_WORKLOAD)] = 32,
    load: Annotated[
        float,
        typer.Option(
            help="One by one: their rate, as a share of what continuous batching gets done.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_WORKLOAD)] = 0,
) -> None:
    """All batching strategies on the same requests, at several variations of the output lengths.

    Requests come at once, where static and dynamic batches are the same, and
    one by one, where a static batch first has to wait for enough of them.
    Latency is from a request's arrival to its last token.
    """
    from chairlift.lab.bench.policies.plot import plot_policies
    from chairlift.lab.bench.policies.run import PoliciesSettings, Strategy, compare_policies
    from chairlift.lab.common.engines import EngineMaker

    refuse_given(context, ("policy", "attention"), "this bench compares several; see --strategies")
    refuse_given(context, ("max_batch_requests",), "give --concurrency instead")
    refuse_given(context, ("prefix_caching",), "the prompts of this bench share nothing")
    settings = PoliciesSettings(
        strategies=[Strategy.parse(text) for text in strategies.split(",")],
        arrivals=[name.strip() for name in arrivals.split(",")],
        variations=parse_numbers("variations", variations, float),
        requests=requests,
        prompt=prompt,
        output=output,
        seats=concurrency,
        load=load,
        max_delay_ms=engine.max_delay_ms,
        seed=seed,
    )
    report.check()
    show_log(quiet=True)
    options = engine.config() | {"max_delay_ms": None}
    with watch(enabled=not engine.quiet) as note:
        note(f"loading {engine.model}")
        maker = EngineMaker.load(engine.model, options, progress=not engine.quiet)
        points = compare_policies(maker, settings, note=note)
    show_policies(points)
    asked = maker.settings() | asdict(settings) | {"strategies": [str(each) for each in settings.strategies]}
    rows = [point.row() for point in points]
    report.write("policies", asked, rows, lambda path, here: plot_policies(path, points, here))


def show_policies(points: Sequence[PolicyPoint]) -> None:
    for arrivals in dict.fromkeys(point.arrivals for point in points):
        show_table(
            "All requests at once" if arrivals == "at-once" else "Requests one by one (Poisson)",
            [
                "Strategy",
                "Spread",
                "Output\ntokens/s",
                "Useful\ntokens",
                "Latency\np50 s",
                "Latency\np99 s",
                "Batch\nmean",
            ],
            (
                [
                    str(point.strategy),
                    f"{point.variation:g}",
                    f"{row['output_tokens_per_s']:,.1f}",
                    f"{row['useful_token_share']:.0%}",
                    f"{row['latency_p50_ms'] / 1e3:.2f}",
                    f"{row['latency_p99_ms'] / 1e3:.2f}",
                    f"{row['mean_batch_requests']:.1f}",
                ]
                for point, row in ((point, point.row()) for point in points if point.arrivals == arrivals)
            ),
            "Spread: standard deviation / mean of the output lengths. Batch: requests that compute in a step",
        )

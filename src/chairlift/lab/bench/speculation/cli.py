"""`chairlift bench speculation`."""

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
    from chairlift.lab.bench.speculation.run import SpeculationPoint


@bench(
    "speculation",
    "chairlift bench speculation",
    "chairlift bench speculation --proposers ngram,draft:smollm2-135m --scenarios chat --plot speed.png",
)
def bench_speculation(
    context: typer.Context,
    engine: EngineOptions,
    report: ReportOptions,
    proposers: Annotated[
        str, typer.Option(help="Where guesses come from: ngram, layers:N, draft:PATH, with commas between them.")
    ] = "ngram",
    scenarios: Annotated[str, typer.Option(help="What to ask for.")] = "extraction,code-edit,quotes,chat",
    batches: Annotated[str, typer.Option(help="How many requests at once.")] = "1,4,16,64",
    tokens: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often each engine gets all requests.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
) -> None:
    """Tokens per second with and without speculation, on text that repeats its prompt and on text that does not.

    The same requests go through all engines in turns (on a CPU, step by step),
    so that what else the machine does meanwhile meets all of them. One engine
    without guesses runs twice: the difference is noise. Outputs are compared.
    """
    from chairlift.lab.bench.speculation.plot import plot_speculation
    from chairlift.lab.bench.speculation.run import SpeculationSettings, compare_speculation, parse_names
    from chairlift.lab.common.engines import EngineMaker

    refuse_given(context, ("speculate", "max_batch_requests"), "this bench chooses it; see --proposers and --batches")
    settings = SpeculationSettings(
        proposers=parse_names(proposers),
        scenarios=parse_names(scenarios),
        batches=tuple(parse_numbers("batches", batches)),
        tokens=tokens,
        rounds=rounds,
        temperature=temperature,
        draft_length=engine.draft_length,
    )
    report.check()
    show_log(quiet=True)
    options = {name: value for name, value in engine.config().items() if name not in ("speculate", "draft_length")}
    with watch(enabled=not engine.quiet) as note:
        note(f"loading {engine.model}")
        maker = EngineMaker.load(engine.model, options, progress=not engine.quiet)
        points = compare_speculation(maker, settings, note)
    show_speculation(points)
    rows = [point.row() for point in points]
    asked = maker.settings() | asdict(settings)
    report.write("speculation", asked, rows, lambda path, here: plot_speculation(path, points, here))


def show_speculation(points: Sequence[SpeculationPoint]) -> None:
    show_table(
        "Speculation",
        ["", "Batch", "Guesses", "Output\ntokens/s", "Times\nas fast", "Rounds", "Accepted", "Length", "Same\noutput"],
        (
            [
                point.scenario,
                f"{point.batch}",
                point.proposer,
                f"{point.row()['output_tokens_per_s']:,.1f}",
                f"{point.speedup:.2f}",
                f"{min(point.speedups):.2f} to {max(point.speedups):.2f}",
                "" if point.acceptance is None else f"{point.acceptance:.0%}",
                "" if point.mean_accepted is None else f"{point.mean_accepted:.2f}",
                "yes" if point.same_output else "no",
            ]
            for point in points
        ),
        "Times as fast: the median of the rounds. Accepted: share of the guesses that were right. "
        "Length: right guesses per verification",
    )

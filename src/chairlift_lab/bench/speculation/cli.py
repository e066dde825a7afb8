"""`chairlift bench speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from chairlift.progress import Note
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, VariedEngineOptions, bench
from chairlift_lab.report.lists import number_list
from chairlift_lab.report.options import ReportOptions

COLUMNS = (
    Column("", lambda point: point.scenario),
    Column("Batch", lambda point: point.batch),
    Column("Drafts", lambda point: point.proposer),
    Column("Output\ntokens/s", lambda point: point.row()["output_tokens_per_s"], ",.1f"),
    Column("Times\nas fast", lambda point: point.speedup, ".2f"),
    Column("Rounds", lambda point: f"{min(point.speedups):.2f} to {max(point.speedups):.2f}"),
    Column("Accepted", lambda point: point.acceptance, ".0%", missing=""),
    Column("Length", lambda point: point.mean_accepted, ".2f", missing=""),
    Column("Same\noutput", lambda point: point.same_output),
)
CAPTION = (
    "Times as fast: the median of the rounds. Accepted: share of the draft tokens. "
    "Length: accepted draft tokens per verification"
)
ABLATION_COLUMNS = (
    Column("Without", lambda point: point.name),
    Column("Time", lambda point: point.ratio, ".3f"),
    Column("Noise", lambda point: point.noise, ".3f"),
    Column("Most", lambda point: point.worst[1], ".3f"),
    Column("In", lambda point: point.worst[0]),
    Column("Earns its\nplace", lambda point: point.earns_its_place),
)
ABLATION_CAPTION = (
    "Time of all replays relative to the default, as a geometric mean, with its standard error; "
    "and the workload in which the constant saves most"
)


@bench(
    "speculation",
    "chairlift bench speculation",
    "chairlift bench speculation --proposers ngram,draft:smollm2-135m --scenarios chat --plot speed.png",
    "chairlift bench speculation --ablate --json ablation.json",
    report=ReportOptions,
)
def bench_speculation(
    context: typer.Context,
    engine: VariedEngineOptions,
    note: Note,
    proposers: Annotated[str, typer.Option(help="Values of --speculate to compare, separated by commas.")] = "ngram",
    scenarios: Annotated[str, typer.Option(help="Kinds of text to generate.")] = "extraction,code-edit,quotes,chat",
    batches: Annotated[Sequence[int], number_list("Concurrent requests.")] = (1, 4, 16, 64),
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; each engine serves all requests in each.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Replay recorded drafts without each tuned constant instead.")
    ] = False,
) -> BenchResult:
    """Tokens per second with and without speculation, on text that repeats its prompt and on text that does not.

    The same requests go through all engines in turns (on a CPU, step by step),
    so that other load on the machine affects all of them. The engine without
    speculation runs twice: the difference is noise. Outputs are compared.
    """
    if ablate:
        return _ablate(rounds, note)
    from chairlift_lab.bench.speculation.plot import plot_speculation
    from chairlift_lab.bench.speculation.run import SpeculationSettings, compare_speculation, parse_names
    from chairlift_lab.common.engines import EngineMaker

    refuse_given(context, ("speculate", "max_batch_requests"), "is chosen by this bench; see --proposers and --batches")
    settings = SpeculationSettings(
        proposers=parse_names(proposers),
        scenarios=parse_names(scenarios),
        batches=tuple(batches),
        tokens=tokens,
        rounds=rounds,
        temperature=temperature,
        draft_length=engine.draft_length,
        draft_graphs=engine.draft_graphs,
    )
    maker = EngineMaker.from_options(engine, note, speculate=None, draft_length=None, draft_graphs=False)
    points = compare_speculation(maker, settings, note)
    return BenchResult(
        maker.settings() | asdict(settings),
        [point.row() for point in points],
        [Table("Speculation", COLUMNS, points, CAPTION)],
        lambda path, footnote: plot_speculation(path, points, footnote),
    )


def _ablate(seeds: int, note: Note) -> BenchResult:
    from chairlift_lab.bench.speculation.ablation import ablate

    points = ablate(seeds, note)
    table = Table("Speculation without each tuned constant", ABLATION_COLUMNS, points, ABLATION_CAPTION)
    return BenchResult({"ablate": True, "seeds": seeds}, [point.row() for point in points], [table])

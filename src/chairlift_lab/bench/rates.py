"""The highest rate of recorded traffic at which the targets of all classes are kept, for several schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.core.targets import parse_classes
from chairlift.errors import InvalidParameter
from chairlift.options import between
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.load.trace_files import load_trace
from chairlift_lab.planning.machine import MachineOptions
from chairlift_lab.planning.options import ReplicaOptions, TargetOptions
from chairlift_lab.planning.tuning import RATIO, Judge, described
from chairlift_lab.planning.what_if import Changes, parse_changes
from chairlift_lab.report.options import Settings

CLASSES = ("interactive=ttft:500,tpot:50", "standard=ttft:2000,tpot:100", "batch=e2e:60000")
# First come, first served with fixed chunks of several sizes; earliest due first with each budget; least slack first.
SCHEDULERS = (
    *(f"order=fcfs,budget=fixed,max_batch_tokens={tokens}" for tokens in (512, 2048, 8192)),
    *(f"order=edf,budget={budget}" for budget in ("fixed", "knee", "slack")),
    "order=slack",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesSettings(Settings):
    trace: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Recorded traffic; may be repeated.")] = None
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=TARGETS",
            help="Classes of requests; may be repeated.",
            show_default="interactive, standard and batch",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--settings",
            metavar="NAME=VALUE[,NAME=VALUE…]",
            help="A scheduler, by options of `chairlift serve`; may be repeated.",
            show_default="fcfs with chunks of 512, 2048 and 8192, edf with each budget, slack",
        ),
    ] = None
    share: Annotated[float, typer.Option(help="Share of each class that must meet its targets.")] = 0.99
    requests: Annotated[int | None, typer.Option(help="Requests of each trace.", show_default="all", min=1)] = None
    seed: Annotated[int, typer.Option(help="The same seed gives the same classes.")] = 0


def highest_rates(judge: Judge, trace: str, schedulers: Sequence[Changes], note: Note) -> list[dict[str, Any]]:
    """The highest rate of each scheduler, and how many times that of first come, first served it is."""
    recorded, rows = len(judge.entries) / max(judge.entries[-1].at, 1e-9), list[dict[str, Any]]()
    for changes in schedulers:
        note(f"{trace}: {described(changes)}")
        level = judge.reach(changes)
        rate = None if level is None else recorded * RATIO**level
        rows.append({"name": described(changes), "trace": trace, "settings": dict(changes), "rate": rate})
    first = [row["rate"] for row in rows if row["settings"].get("order") == "fcfs" and row["rate"]]
    for row in rows:
        row["ratio"] = row["rate"] / max(first) if row["rate"] and first else None
    return rows


COLUMNS = (
    Column("Scheduler", "name"),
    Column("Highest rate", "rate", ".2f", 1, " req/s"),
    Column("Beside fcfs", "ratio", ".2f", 1, "x"),
)


@bench(
    "rates",
    "chairlift bench rates --trace azure_2023_code.csv --trace azure_2023_conversation.csv",
    "chairlift bench rates --trace traffic.csv --settings order=edf --settings order=slack --share 0.95",
)
def bench_rates(machine: MachineOptions, settings: RatesSettings, note: Note) -> BenchResult:
    """The highest rate of a trace at which each class of requests meets its targets, simulated.

    The trace is played faster until too many requests of a class are late.
    """
    between(0.01, 1)("share", settings.share)
    if not settings.trace:
        raise InvalidParameter("trace", "give recorded traffic with --trace")
    classes = list(parse_classes(settings.classes or CLASSES).values())
    schedulers = [parse_changes(text, "settings") for text in settings.settings or SCHEDULERS]
    rows, tables = list[dict[str, Any]](), []
    for path in settings.trace:
        entries = load_trace(path)[: settings.requests]
        replica, cost = ReplicaOptions().settings(machine, TargetOptions(), entries)
        judge = Judge(entries, classes, replica, cost, settings.share, settings.seed)
        found = highest_rates(judge, path.stem, schedulers, note)
        rows += found
        tables.append(Table(f"{path.stem}: {settings.share:.0%} of each class within its targets", COLUMNS, found))
    facts = {"model": machine.model, "device": machine.device, "share": settings.share, "seed": settings.seed}
    facts |= {"classes": settings.classes or list(CLASSES), "requests": settings.requests}
    return BenchResult(facts, rows, tables)

"""`chairlift tune`: the settings with which the fewest replicas keep the targets of recorded traffic."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.errors import InvalidParameter
from chairlift.options import above, between
from chairlift.progress import Note, watch
from chairlift.terminal.options import given
from chairlift.terminal.tables import Line, show_table
from chairlift_lab.planning.machine import MachineOptions
from chairlift_lab.planning.options import ClassOptions, ReplicaOptions, TrafficOptions
from chairlift_lab.report.options import JsonOptions, check_writable

if TYPE_CHECKING:
    from chairlift.core.targets import ServiceClass
    from chairlift_lab.planning.tuning import Search

SEARCHED = ("order", "budget", "max_batch_tokens", "max_batch_requests", "max_overtakes")
UNUSED = ("rate", "arrivals", "prompt_len", "output_len", "copies", "spread", "trace_seconds", "trace_speed")


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift tune --log access.jsonl --target ttft:500,tpot:50 --out server.yaml",
        "chairlift tune --trace traffic.csv --class interactive=ttft:500,tpot:50 --class batch=e2e:60000,share:2",
        "chairlift tune --log access.jsonl --target tpot:40 --order fcfs --profile profile.json",
    ],
)
def tune(
    context: typer.Context,
    machine: MachineOptions,
    targets: ClassOptions,
    traffic: TrafficOptions,
    engine: ReplicaOptions,
    report: JsonOptions,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGETS", help="Targets of all requests, such as ttft:500,tpot:50.", rich_help_panel="Targets"
        ),
    ] = None,
    share: Annotated[
        float,
        typer.Option(help="Share of the requests of each class that must meet its targets.", rich_help_panel="Targets"),
    ] = 0.99,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the settings there, for `chairlift serve --config`.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="End the search after this long.")] = 240.0,
    compare_grid: Annotated[
        bool,
        typer.Option(
            "--compare-grid", help="Also try a grid of 60 settings, and compare its best with what was found."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Search for the settings that keep the targets of recorded traffic with the fewest replicas.

    The engine's own scheduler runs on a virtual clock. Options of the engine
    that are given stay as they are, and the others are searched.
    """
    from chairlift.core.budgets.base import default_budget
    from chairlift.core.orderings.base import make_ordering
    from chairlift_lab.planning.tuning import Judge, Search, require_targets
    from chairlift_lab.planning.what_if import config_file

    between(0.01, 1)("share", share)
    above(0)("seconds", seconds)
    report.check()
    if out is not None:
        check_writable(out, "out")
    for name in UNUSED:
        if given(context, name):
            raise InvalidParameter(name, "does not go with tune, which changes the speed of the trace itself")
    classes, entries = _classes(targets, target), traffic.entries()
    if not entries:
        raise InvalidParameter("log", "give recorded traffic with --log or --trace")
    require_targets(entries, classes)
    settings, cost = engine.settings(machine, targets, entries)
    if settings.budget is None:  # The search begins with the budget that is simulated the fastest.
        settings = replace(settings, budget=default_budget(make_ordering(engine.order).own_budget, has_target=False))
    judge = Judge(entries, classes, settings, cost, share, traffic.seed)
    fixed = frozenset(name for name in SEARCHED if given(context, name))
    start = {"order": engine.order, "max_batch_tokens": engine.max_batch_tokens}
    start |= {"max_batch_requests": settings.slots, "budget": settings.budget}
    begun, computed = time.perf_counter(), time.process_time()
    with watch(enabled=not quiet) as note:
        search = Search(judge, start, fixed, note, seconds)
        search.run()
        spent = {"wall_seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - computed}
        grid = _try_grid(search, note) if compare_grid else None
    row = _row(search, len(entries) / max(entries[-1].at, 1e-9)) | spent | {"grid": grid}
    _show(row, search)
    if search.level is not None:
        remark = f"{share:.0%} of each class meet its targets at {row['rate']:.3g} requests/s per replica (simulated)"
        text = config_file(search.best, f"chairlift tune: {remark}")
        if out is not None:
            out.write_text(text, encoding="utf-8")
        typer.echo(text, nl=False)
    parameters = {name: context.params[name] for name in ("model", "device", "classes", "target", "share", "seed")}
    parameters |= {name: str(path) if (path := context.params[name]) else None for name in ("trace", "log")}
    report.write("tune", parameters, [row])


def _classes(targets: ClassOptions, target: str | None) -> Sequence[ServiceClass]:
    """The classes of requests; targets of all are those of one class."""
    from chairlift.core.targets import ServiceClass, parse_classes

    named, goal = targets.named(), targets.resolve()
    if target is not None:
        if named or goal.given:
            raise InvalidParameter("target", "goes neither with --class nor with --target-ttft-ms and the others")
        return list(parse_classes([f"all={target}"]).values())
    return [ServiceClass("all", goal)] if goal.given else named


def _try_grid(search: Search, note: Note) -> dict[str, Any]:
    """Which settings of a grid keep the targets at a higher speed than those that were found, and how far they come."""
    from chairlift_lab.planning.tuning import Search, grid

    begun, computed = time.perf_counter(), time.process_time()
    other = Search(search.judge, search.best, note=note, level=search.level)
    for changes in grid():
        other.consider(changes)
    better = [trial for trial in other.trials if trial.level is not None]
    speed = _speed(other.level) if better and other.level is not None else None
    spent = {"wall_seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - computed}
    settings = dict(other.best) if better else None
    return {"size": len(other.trials), "better": len(better), "speed": speed, "settings": settings} | spent


def _speed(level: int) -> float:
    from chairlift_lab.planning.tuning import RATIO

    return math.pow(RATIO, level)


def _row(search: Search, recorded_rate: float) -> dict[str, Any]:
    speed = None if search.level is None else _speed(search.level)
    as_is = search.trials[0].level
    return {
        "name": "tune",
        "settings": dict(search.best),
        "speed": speed,
        "rate": None if speed is None else speed * recorded_rate,
        "replicas": None if speed is None else math.ceil(1 / speed),
        "speed_as_is": None if as_is is None else _speed(as_is),
        "tried": [
            {"settings": dict(trial.changes), "speed": None if trial.level is None else _speed(trial.level)}
            for trial in search.trials
        ],
        "simulations": len(search.judge.seen),
    }


def _show(row: dict[str, Any], search: Search) -> None:
    from chairlift_lab.planning.tuning import described

    tried = [
        [described(trial.changes), "-" if trial.level is None else f"{_speed(trial.level):.3f}"]
        for trial in search.trials
    ]
    caption = "Speed: of the recorded traffic, at which the targets are kept. -: not above the best so far"
    show_table("What was tried", ["Settings", "Speed"], tried, caption)
    if row["speed"] is None:
        Line("None of these settings keeps the targets, however slowly the requests come.").show()
        return
    before = "the targets are not kept" if row["speed_as_is"] is None else f"a speed of {row['speed_as_is']:.3f}"
    replicas = f"{row['replicas']:,} replica{'s' if row['replicas'] > 1 else ''} for the recorded rate"
    Line(f"Best: a speed of {row['speed']:.3f}, {row['rate']:.3g} requests/s per replica; {replicas}").show()
    Line(f"As given: {before}. {row['simulations']} simulations in {row['wall_seconds']:.0f} s").show()
    if (grid := row["grid"]) is not None:
        best = f"; the best reaches {grid['speed']:.3f} with {described(grid['settings'])}" if grid["better"] else ""
        verdict = f"{grid['better']} keep the targets at a higher speed{best} ({grid['wall_seconds']:.0f} s)"
        Line(f"Of a grid of {grid['size']} settings, {verdict}").show()

"""Policies, orderings and budgets compared on recorded traffic: simulated, and on the real engine of this machine.

`--page docs/schedulers.md` writes the tables as a page, and `--results` as a section of docs/results.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.core.targets import NO_TARGETS, ServiceClass, parse_classes
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, VariedEngineOptions, bench
from chairlift_lab.load.trace_files import TraceEntry, load_trace
from chairlift_lab.planning.machine import MachineOptions
from chairlift_lab.planning.options import ReplicaOptions, TargetOptions
from chairlift_lab.planning.prediction import ReplicaSettings, assign_classes, simulate_alone, trace_arrivals
from chairlift_lab.planning.served_recording import ServedRecording
from chairlift_lab.planning.what_if import Changes, changed
from chairlift_lab.report.options import Count, Positive, Settings, check_writable, machine, machine_line
from chairlift_lab.simulator.outcome import Arrival, RequestRecord, SimulationOutcome, attainment, percentile
from chairlift_lab.simulator.step_cost import MeasuredCost, StepCost

if TYPE_CHECKING:
    from chairlift_lab.common.engines import EngineMaker

CLASSES = ("interactive=ttft:500,tpot:50", "standard=ttft:2000,tpot:100", "batch=e2e:60000")
TENANTS = 8
HEAVY = "tenant 0"  # It sends as much as all others together.
FIXED = {"order": "fcfs", "budget": "fixed"}
SCHEDULERS: Sequence[Changes] = (
    *({"policy": policy, "order": "fcfs", "budget": "fixed"} for policy in ("static", "dynamic")),
    *(FIXED, FIXED | {"max_batch_tokens": 512}, {"order": "fcfs", "budget": "knee"}),
    {"order": "fcfs", "budget": "slack"},
    *({"order": order, "budget": "fixed"} for order in ("shortest", "boost", "cached", "fair", "fair-cached", "edf")),
    *({"order": "edf", "budget": "slack"}, {"order": "slack", "budget": "slack"}),
    {"order": "slack", "budget": "fixed"},
)
NEEDS_CACHE = ("cached", "fair-cached")
ON_THE_ENGINE: Sequence[Changes] = (FIXED, *SCHEDULERS[-3:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulersSettings(Settings):
    """The traffic, and what is written."""

    trace: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Recorded traffic; may be repeated.")] = None
    recording: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A run of vLLM that LLMServingSim recorded, as well.")
    ] = None
    requests: Annotated[Count, typer.Option(help="Requests of each trace.")] = 1500
    load: Annotated[Positive, typer.Option(help="Request rate, as a share of what fcfs gets done at most.")] = 0.7
    seed: Annotated[int, typer.Option(help="The same seed gives the same classes and tenants.")] = 0
    engine_requests: Annotated[
        int, typer.Option(help="Requests of the first trace, scaled down, on the real engine; 0: none.")
    ] = 0
    engine_scale: Annotated[Positive, typer.Option(help="What their lengths are multiplied by.")] = 0.05
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables as a page in Markdown.")] = None
    results: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables as JSON of docs/results.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Traffic at a rate, on a replica."""

    name: str
    entries: Sequence[TraceEntry]
    classes: Sequence[ServiceClass]
    settings: ReplicaSettings
    cost: StepCost
    share: float
    seed: int

    def arrivals(self, speed: float) -> list[Arrival]:
        rng = random.Random(f"tenants {self.seed}")
        weights = [TENANTS - 1, *[1] * (TENANTS - 1)]
        entries = [entry.scaled(1.0, speed) for entry in self.entries]
        drawn = assign_classes(trace_arrivals(entries), self.classes, self.seed)
        numbers = rng.choices(range(TENANTS), weights, k=len(entries))
        return [replace(each, tenant=f"tenant {number}") for each, number in zip(drawn, numbers, strict=True)]

    def speed(self) -> float:
        """How much faster the trace comes, so that the load is the given share of what fcfs gets done at most."""
        at_once = [replace(arrival, time=0.0) for arrival in self.arrivals(1.0)]
        seconds = simulate_alone(at_once, changed(self.settings, FIXED).make(self.cost)).seconds
        return self.share * self.entries[-1].at / seconds

    def simulated(self, changes: Changes, speed: float) -> SimulationOutcome:
        return simulate_alone(self.arrivals(speed), changed(self.settings, changes).make(self.cost))


def row_of(load: str, changes: Changes, outcome: SimulationOutcome) -> dict[str, Any]:
    """The figures of one scheduler on one trace; times are in milliseconds."""
    records = outcome.records
    ttfts = [record.ttft for record in records]
    light = [record.ttft for record in records if record.tenant != HEAVY]
    tpots = [record.tpot for record in records if record.tpot is not None]
    return {
        "name": _name(changes),
        "trace": load,
        "requests_per_s": len(records) / outcome.seconds,
        "goodput_requests_per_s": sum(record.is_good(NO_TARGETS) for record in records) / outcome.seconds,
        **{f"within_{name}": each["good_share"] for name, each in attainment(records).items()},
        "ttft_p50_ms": _milliseconds(ttfts, 50),
        "ttft_p99_ms": _milliseconds(ttfts, 99),
        "tpot_p50_ms": _milliseconds(tpots, 50),
        "tpot_p99_ms": _milliseconds(tpots, 99),
        "light_ttft_p99_ms": _milliseconds(light, 99),
        "preemptions": outcome.preemptions,
    }


def _milliseconds(seconds: Sequence[float], share: float) -> float | None:
    return 1e3 * percentile(seconds, share) if seconds else None


def _name(changes: Changes) -> str:
    words = [str(changes["order"]), str(changes["budget"])]
    if "policy" in changes:
        words.insert(0, str(changes["policy"]))
    if "max_batch_tokens" in changes:
        words.append(f"{changes['max_batch_tokens']} tokens")
    return ", ".join(words)


COLUMNS = (
    Column("Scheduler: order, budget", "name"),
    Column("Goodput", "goodput_requests_per_s", ".2f", 1, " req/s"),
    *(Column(name.capitalize(), f"within_{name}", ".1%") for name in ("interactive", "standard", "batch")),
    Column("TTFT p50", "ttft_p50_ms", ",.0f", 1, " ms"),
    Column("TTFT p99", "ttft_p99_ms", ",.0f", 1, " ms"),
    Column("TPOT p50", "tpot_p50_ms", ",.1f", 1, " ms"),
    Column("TPOT p99", "tpot_p99_ms", ",.1f", 1, " ms"),
    Column("TTFT p99, light tenants", "light_ttft_p99_ms", ",.0f", 1, " ms"),
    Column("Preemptions", "preemptions", ",d"),
)


# ---- simulated --------------------------------------------------------------------------------------------------


def _loads(settings: SchedulersSettings, device: MachineOptions) -> Iterator[Load]:
    """The traces on one replica of the device, and the recording on its own machine."""
    classes = list(parse_classes(CLASSES).values())
    for path in settings.trace or ():
        entries = load_trace(path)[: settings.requests]
        replica, cost = ReplicaOptions().settings(device, TargetOptions(), entries)
        yield Load(path.stem, entries, classes, replica, cost, settings.load, settings.seed)
    if settings.recording is not None:
        run = ServedRecording.load(settings.recording)
        name, entries = settings.recording.name, list(run.entries)[: settings.requests]
        yield Load(name, entries, classes, run.settings, run.cost, settings.load, settings.seed)


def simulated_rows(load: Load, note: Note) -> list[dict[str, Any]]:
    """All schedulers on one trace, at the same rate."""
    note(f"{load.name}: the highest rate")
    speed, rows = load.speed(), []
    for changes in SCHEDULERS:
        if changes.get("order") not in NEEDS_CACHE or load.settings.prefix_caching:
            note(f"{load.name}: {_name(changes)}")
            rows.append(row_of(load.name, changes, load.simulated(changes, speed)))
    return rows


# ---- on the engine ----------------------------------------------------------------------------------------------


def engine_rows(maker: EngineMaker, load: Load, vocabulary: Sequence[int], note: Note) -> list[dict[str, Any]]:
    """Schedulers on the real engine, each beside its simulation with prices that are fitted to steps of a run in which
    all requests come at once. That run also says which rate is the given share of the highest."""
    from chairlift_lab.bench.profile import watch_steps
    from chairlift_lab.common.engines import run_sessions

    note("engine: all requests at once")
    engine = maker.engine(order="fcfs", budget="fixed")
    run_sessions(engine, _sessions(load.arrivals(1.0)[:4], vocabulary, seed=1))  # warms up
    watched = watch_steps(engine)
    at_once = run_sessions(engine, _sessions(load.arrivals(1.0), vocabulary, seed=2))
    cost = MeasuredCost.fit(watched.steps)
    limits, scheduler = engine.scheduler.budget.most, engine.scheduler
    replica = ReplicaSettings(
        scheduler.kv.num_blocks,
        scheduler.kv.block_size,
        scheduler.max_batch_requests,
        limits.tokens,
        limits.prefill_tokens,
        prefix_caching=scheduler.kv.prefix_caching,
    )
    load = replace(load, settings=replica, cost=replace(cost, pace=None))
    speed = load.share * load.entries[-1].at / at_once.seconds
    rows = []
    for changes in ON_THE_ENGINE:
        note(f"engine: {_name(changes)}")
        arrivals = load.arrivals(speed)
        measured = run_sessions(
            maker.engine(**changes),
            _sessions(arrivals, vocabulary, seed=3, targets=changes["order"] != "fcfs"),
            arrivals=[arrival.time for arrival in arrivals],
        )
        records = starmap(_record, zip(arrivals, measured.token_times, strict=True))
        inside = measured.inside
        outcome = SimulationOutcome(list(records), measured.seconds, preemptions=inside.preemptions if inside else 0)
        for run, each in {"measured": outcome, "simulated": load.simulated(changes, speed)}.items():
            rows.append(row_of(load.name, changes, each) | {"name": f"{_name(changes)}: {run}"})
    return rows


def _sessions(arrivals: Sequence[Arrival], vocabulary: Sequence[int], *, seed: int, targets: bool = False) -> list[Any]:
    """Random prompts of the lengths of `arrivals`, with the targets of their classes if the scheduler knows those."""
    from chairlift_lab.common.engines import Session
    from chairlift_lab.common.workload import BenchRequest, TokenSource

    source, sessions = TokenSource(vocabulary, seed), []
    for arrival in arrivals:
        own = arrival.service_class.targets if targets and arrival.service_class else NO_TARGETS
        sessions.append(Session((BenchRequest(source.draw(len(arrival.prompt)), arrival.n_out),), own))
    return sessions


def _record(arrival: Arrival, times: Sequence[float]) -> RequestRecord:
    return RequestRecord(
        arrival.time,
        len(arrival.prompt),
        arrival.n_out,
        0,
        times[0],
        times[-1],
        tenant=arrival.tenant,
        service_class=arrival.service_class,
    )


# ---- the page ---------------------------------------------------------------------------------------------------

INTRODUCTION = """# Schedulers compared

Every table has one trace at one rate: {load:.0%} of what first come, first served gets done when all requests come at
once. A third of the requests each is *interactive* (time to the first token 500 ms, per later token 50 ms), *standard*
(2 s and 100 ms) and *batch* (60 s for the whole answer), drawn at random. *Goodput* counts the requests that met the
targets of their class, and the three columns after it are the shares of each class that did. One of eight tenants sends
half of the requests; the *light tenants* are the others. `static` and `dynamic` are
[policies](scheduling.md#policies) with the order `fcfs`; the others are [orders](scheduling.md#orderings) with the
policy `continuous` and a [budget](scheduling.md#budgets). Steps have up to 8,192 tokens unless a row says otherwise.

The schedulers run in [simulation](simulation.md): {machine}, with the first {requests:,} requests of each trace. The
recording of vLLM runs with the kernel times and the memory of its own machine. The lengths of outputs are known to
`shortest` and to the targets of whole answers.

This page is written by a command, together with [the raw results](results/schedulers.json):

```bash
{command}
```
"""
ENGINE = """
## {title} on the real engine

The first {count} requests of this trace with lengths of {scale:g} of the real ones, on this engine ({machine};
{model}), and the simulation of the same requests with prices that were fitted to the steps of a run before.

"""


def page_of(sections: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], introduction: str) -> str:
    """The page with a table for each section, whose title may be a text of its own."""
    parts = [introduction]
    for title, rows in sections:
        parts.append(title if "\n" in title else f"\n## {title}\n\n")
        shown = [column for column in COLUMNS if any(_value(column, row) is not None for row in rows)]
        lines = [[column.heading for column in shown], ["---"] * len(shown)]
        lines += [[_cell(column, row) for column in shown] for row in rows]
        parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "".join(parts)


def _value(column: Column, row: Mapping[str, Any]) -> Any:
    return row.get(column.value) if isinstance(column.value, str) else column.value(row)


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    return column.missing if _value(column, row) is None else column.cell(row)


def results_of(sections: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], command: str) -> dict[str, Any]:
    """The rows as docs/results has them."""
    here = {"commit": _commit(), "date": datetime.now(UTC).date().isoformat(), "machine": machine_line(machine())}
    return {
        "subject": "schedulers",
        "sections": [
            {"title": title, **here, "commands": [command], "text": []}
            | {"tables": [{"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}]}
            for title, rows in sections
        ],
    }


def _commit() -> str:
    folder = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, cwd=folder)
    return found.stdout.strip() or "unknown"


@bench(
    "schedulers",
    "chairlift bench schedulers --trace azure_2023_code.csv --trace mooncake_conversation.jsonl",
    "chairlift bench schedulers --trace azure_2023_conversation.csv --engine-requests 60 --load 0.6",
)
def bench_schedulers(
    engine: VariedEngineOptions,
    settings: SchedulersSettings,
    note: Note,
) -> BenchResult:
    """Goodput, latencies and preemptions of policies, orderings and budgets on recorded traffic, simulated.

    The simulated machine is an H200 with Llama-3-8B. With --engine-requests,
    some schedulers also run on the engine of this machine, with --model.
    """
    for name in ("page", "results"):
        if (path := getattr(settings, name)) is not None:
            check_writable(path, name)
    if not settings.trace:
        raise InvalidParameter("trace", "give recorded traffic with --trace")
    if settings.engine_requests < 0:
        raise InvalidParameter("engine_requests", f"must not be negative, got {settings.engine_requests}")
    sections = [(load.name, simulated_rows(load, note)) for load in _loads(settings, MachineOptions())]
    pages = list(sections)
    if settings.engine_requests:
        title, rows = settings.trace[0].stem, _on_the_engine(engine, settings.trace[0], settings, note)
        facts = {"count": settings.engine_requests, "scale": settings.engine_scale, "model": engine.model}
        sections.append((f"{title} on the real engine", rows))
        pages.append((ENGINE.format(title=title, machine=machine_line(machine()), **facts), rows))
    command = _command(settings)
    if settings.page is not None:
        device = MachineOptions()
        facts = {"load": settings.load, "requests": settings.requests, "command": command}
        introduction = INTRODUCTION.format(machine=f"{device.model} on one {device.device.upper()}", **facts)
        settings.page.write_text(page_of(pages, introduction), encoding="utf-8")
    if settings.results is not None:
        text = json.dumps(results_of(sections, command.replace("\\\n    ", "")), indent=1) + "\n"
        settings.results.write_text(text, encoding="utf-8")
    tables = [Table(name, COLUMNS, rows) for name, rows in sections]
    facts = {"load": settings.load, "requests": settings.requests, "seed": settings.seed, "classes": list(CLASSES)}
    return BenchResult(facts, [row for _, rows in sections for row in rows], tables)


def _on_the_engine(
    engine: EngineOptions, trace: Path, settings: SchedulersSettings, note: Note
) -> list[dict[str, Any]]:
    from chairlift_lab.common.engines import EngineMaker

    maker = EngineMaker.from_options(engine, note)
    scaled = [entry.scaled(settings.engine_scale, 1.0) for entry in load_trace(trace)]
    entries = [replace(entry, blocks=()) for entry in scaled[: settings.engine_requests]]
    nothing = ReplicaSettings(1), MeasuredCost(1.0, 0.0, 0.0, 0.0, ((0, 0.0),))  # replaced by those of the engine
    classes = list(parse_classes(CLASSES).values())
    load = Load(trace.stem, entries, classes, *nothing, settings.load, settings.seed)
    return engine_rows(maker, load, maker.vocabulary(), note)


def _command(settings: SchedulersSettings) -> str:
    """The command that measures the same again, with the names of the files alone."""
    parts = ["chairlift bench schedulers", *(f"--trace {path.name}" for path in settings.trace or ())]
    parts += [f"--recording {settings.recording.name}"] if settings.recording else []
    parts.append(f"--requests {settings.requests} --load {settings.load:g} --seed {settings.seed}")
    if settings.engine_requests:
        parts.append(f"--engine-requests {settings.engine_requests} --engine-scale {settings.engine_scale:g}")
    parts += [f"--{name} {path}" for name in ("page", "results") if (path := getattr(settings, name))]
    return " \\\n    ".join(parts)

"""`chairlift simulate` and `chairlift plan`: predictions without a model."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.errors import InvalidParameter
from chairlift.options import above
from chairlift.progress import watch
from chairlift.terminal.options import given, refuse_given
from chairlift.terminal.tables import Line, comparison_table, recording_table, show_table
from chairlift_lab.planning.machine import MachineOptions
from chairlift_lab.planning.options import ClassOptions, FleetOptions, ReplicaOptions, TrafficOptions
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from chairlift.cluster.autoscaling import AutoscalingSettings
    from chairlift.core.targets import Targets
    from chairlift_lab.load.trace_files import TraceEntry
    from chairlift_lab.planning.prediction import ReplicaSettings
    from chairlift_lab.simulator.outcome import Arrival, SimulationOutcome
    from chairlift_lab.simulator.replica import Replica
    from chairlift_lab.simulator.step_cost import StepCost

# The options that a report of a simulation has among its settings.
REPORTED = (
    *("replicas", "min_replicas", "max_replicas", "cold_start", "down_delay", "router", "ingresses", "ingress_by"),
    *("policy", "order", "budget", "scheduler", "preemption", "block_size"),
    *("rate", "copies", "spread", "trace_seconds", "requests", "seed"),
)
LOAD = ("rate", "arrivals", "copies", "spread", "trace_speed", "trace_seconds", "prompt_len", "output_len")
_traffic = partial(typer.Option, rich_help_panel="Traffic")


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift simulate --model llama3-8b --device h200 --rate 20 --target-ttft-ms 500 --target-tpot-ms 30",
        "chairlift simulate --trace traffic.csv --replicas 8 --router least-loaded --plot simulation.png",
        "chairlift simulate --policy static --requests 200",
        "chairlift simulate --log access.jsonl --what-if order=slack,max_batch_tokens=1024",
    ],
)
def simulate(
    context: typer.Context,
    machine: MachineOptions,
    targets: ClassOptions,
    fleet: FleetOptions,
    report: ReportOptions,
    traffic: TrafficOptions,
    engine: ReplicaOptions,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="NAME=VALUE[,NAME=VALUE…]",
            help="Also with these options of the engine, beside the others; may be repeated.",
        ),
    ] = None,
    file: Annotated[str | None, typer.Argument(hidden=True, help="Refused with a hint: see --trace.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with a real run recorded by `bench profile --record`."),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Simulate a run of vLLM that LLMServingSim recorded, beside its measurements."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run the engine's own scheduler on a virtual clock.

    Every step takes as long as a roofline of the model and the device predicts,
    or as measured by a profile of a real machine.
    """
    if file is not None:
        raise InvalidParameter("trace", f"to simulate recorded traffic, write --trace {file}")
    if against is not None:
        _compare_with_recording(context, against, report)
        return
    if recording is not None:
        _simulate_recording(context, recording, machine, report)
        return
    from chairlift_lab.planning.prediction import plot_outcome
    from chairlift_lab.planning.what_if import changed, parse_changes
    from chairlift_lab.simulator.outcome import attainment, figures

    fleet.check()
    report.check()
    if traffic.log is not None:
        refuse_given(context, LOAD, "does not go with --log, whose times were measured at its own load; see --trace")
    goal, named = targets.resolve(), targets.named()
    others = {text: parse_changes(text) for text in what_if or ()}
    entries = traffic.entries()
    if traffic.log is not None and not any(entry.measured for entry in entries):
        raise InvalidParameter("log", f"{str(traffic.log)!r} has no measured times; see --trace")
    settings, cost = engine.settings(machine, targets, entries, traffic.typical_length(entries))

    def predict(settings: ReplicaSettings) -> tuple[SimulationOutcome, float]:
        """The outcome with these settings, and how long the simulation took."""
        requests = targets.assign(traffic.draw(entries), traffic.seed)
        return _run(settings, cost, requests, fleet, fleet.autoscaling(goal), quiet=quiet)

    outcome, wall = predict(settings)
    parameters = {name: context.params[name] for name in ("model", "device", *REPORTED)}
    parameters |= {name: str(path) if (path := context.params[name]) else None for name in ("trace", "log")}
    if others or traffic.log is not None:
        outcomes = {name: predict(changed(settings, changes))[0] for name, changes in others.items()}
        _show_what_if(entries if traffic.log else [], {"as is": outcome} | outcomes, goal, parameters, report)
        return
    row = figures(outcome, goal) | {"wall_seconds": wall, "steps_per_wall_second": outcome.steps / wall}
    row["budget"] = settings.budget_name
    if fleet.price is not None:
        tokens = sum(record.n_out for record in outcome.records)
        row["cost_per_million_tokens"] = fleet.price * outcome.replica_seconds / 3600 / tokens * 1e6
    if named:
        row["classes"] = attainment(outcome.records)
    _show_figures(row, goal)
    rows = [{"name": engine.policy} | row]
    report.write("simulate", parameters, rows, lambda path, here: plot_outcome(path, outcome, here))


def _run(
    settings: ReplicaSettings,
    cost: StepCost,
    requests: Iterator[Arrival],
    fleet: FleetOptions,
    autoscaling: AutoscalingSettings | None,
    *,
    quiet: bool,
) -> tuple[SimulationOutcome, float]:
    """Simulate a fleet, and measure how long that takes."""
    from chairlift_lab.simulator.simulation import AutoscaledSize, simulate

    largest = fleet.max_replicas or fleet.replicas

    def make_replica(index: int) -> Replica:
        # Different phases, so that the engines are not all slow at the same time.
        return settings.make(cost, index / largest % 1)

    size = AutoscaledSize(autoscaling, make_replica) if autoscaling else None
    engines = [make_replica(index) for index in range(fleet.replicas)]
    start = time.perf_counter()
    with watch(enabled=not quiet) as note, no_garbage_collection():
        router, ended = fleet.make_router(), count(1)
        outcome = simulate(requests, engines, router, size=size, on_end=lambda _: note(f"{next(ended):,} requests"))
    return outcome, time.perf_counter() - start


def _show_what_if(
    entries: Sequence[TraceEntry],
    outcomes: Mapping[str, SimulationOutcome],
    goal: Targets,
    parameters: Mapping[str, Any],
    report: ReportOptions,
) -> None:
    """Compare the outcomes, the first of which has the present settings, with each other and with what was measured."""
    from chairlift_lab.planning.what_if import comparison, measured_records, show_comparison

    measured = measured_records(entries, outcomes["as is"].records) if entries else []
    rows = comparison(measured, outcomes, goal)
    show_comparison(rows)
    preemptions = (f"{name}: {outcome.preemptions:,} preemptions" for name, outcome in outcomes.items())
    Line("; ".join(preemptions)).show()
    report.write("simulate", parameters, rows)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Large fleets have millions of objects but few cycles: collections would take a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _compare_with_recording(context: typer.Context, against: Path, report: ReportOptions) -> None:
    from chairlift_lab.planning.recording import RecordedRun, compare
    from chairlift_lab.report.options import write_report

    others = [name for name in context.params if name not in ("against", "json_file", "quiet")]
    refuse_given(context, others, "does not go with --against: the recording determines what is simulated")
    report.check()
    rows = compare(RecordedRun.load(against))
    comparison_table(rows).show()
    if report.json_file is not None:
        write_report(report.json_file, "simulate", {"against": str(against)}, rows)


def _simulate_recording(context: typer.Context, folder: Path, machine: MachineOptions, report: ReportOptions) -> None:
    from chairlift_lab.planning.served_recording import ServedRecording
    from chairlift_lab.report.options import write_report
    from chairlift_lab.simulator.outcome import latencies

    others = [name for name in context.params if name not in ("recording", "model", "json_file", "quiet")]
    refuse_given(context, others, "does not go with --recording: it determines what is simulated")
    report.check()
    run = ServedRecording.load(folder, machine.model if given(context, "model") else None)
    outcomes, walls = {}, {}
    for scheduler in ("vllm", "chairlift"):
        start = time.perf_counter()
        outcomes[scheduler] = run.simulated(scheduler)
        walls[scheduler] = time.perf_counter() - start
    learned = run.simulated("chairlift", learn_lengths=True)
    measured = latencies(run.measured) if run.measured else {}
    predicted = {name: latencies(outcome.records) for name, outcome in outcomes.items()}
    rows = []
    for name, theirs in predicted["vllm"].items():
        value, ours = measured.get(name), predicted["chairlift"][name]
        rows.append(
            {"name": name, "measured": value, "vllm": theirs, "error": theirs / value - 1 if value else None}
            | {"chairlift": ours, "change": ours / theirs - 1}
        )
    recording_table(rows).show()
    for name, outcome in outcomes.items():
        speed = f"{outcome.steps:,} steps, {outcome.steps / walls[name]:,.0f} per second of real time"
        Line(f"{name}: {outcome.preemptions:,} preemptions, {speed}").show()
    at_90 = latencies(learned.records)["TPOT p90, ms"]
    with_lengths = f"{learned.preemptions:,} preemptions, TPOT p90 {at_90:,.1f} ms, {learned.seconds:,.1f} s"
    Line(f"chairlift with learn_lengths: {with_lengths}").show()
    if report.json_file is not None:
        write_report(report.json_file, "simulate", {"recording": str(folder)}, rows)


def _rounded(value: float) -> str:
    """Write three significant digits without an exponent: 34,700."""
    number = float(f"{value:.3g}")
    return f"{number:,.0f}" if number >= 100 else f"{number:g}"


def _show_figures(row: dict[str, Any], goal: Targets) -> None:
    def latency(name: str) -> list[str]:
        values = (row[f"{name}_p{share}_ms"] for share in (50, 95, 99))
        return [name.upper(), *("-" if value is None else f"{value:,.1f}" for value in values)]

    price, classes = row.get("cost_per_million_tokens"), row.get("classes", {})
    show_table("Latency, ms", ["", "p50", "p95", "p99"], [latency(name) for name in ("ttft", "tpot", "itl", "e2e")])
    if classes:
        figures = [
            [name, f"{each['requests']:,}", f"{each['good_share']:.2%}"]
            + [f"{each[f'{latency}_p99_ms']:,.1f}" for latency in ("ttft", "e2e")]
            for name, each in classes.items()
        ]
        show_table("Classes", ["", "requests", "within targets", "TTFT p99, ms", "E2E p99, ms"], figures)
    show_table(
        "Service",
        ["", ""],
        [
            ["Requests per second", _rounded(row["requests_per_s"])],
            ["Output tokens per second", f"{row['output_tokens_per_s']:,.0f}"],
            *([["Within the targets", f"{row['good_share']:.1%}"]] if goal.given or classes else []),
            ["Replicas, on average", f"{row['mean_replicas']:,.1f}"],
            ["Busy", f"{row['utilisation']:.1%}"],
            ["Prompt tokens from the cache", f"{row['cached_share']:.1%}"],
            *([["Cost per million output tokens", f"{price:,.2f}"]] if price is not None else []),
            ["Budget", row["budget"]],
            ["Preemptions", f"{row['preemptions']:,}"],
            ["Virtual time", f"{row['seconds']:,.1f} s in {row['steps']:,} steps"],
            ["Real time", f"{row['wall_seconds']:.1f} s, {row['steps_per_wall_second']:,.0f} steps per second"],
        ],
    )


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift plan --model llama3-8b --device h200 --rate 50 --target-ttft-ms 500 --target-tpot-ms 30",
        "chairlift plan --model llama3-8b --class interactive=ttft:500,tpot:50 --class batch=e2e:60000,share:2",
        "chairlift plan --model path/to/config.json --device l4 --dtype int8 --plot plan.png",
        "chairlift plan --device custom --bandwidth 900 --tflops 180 --memory 48",
    ],
)
def plan(
    machine: MachineOptions,
    targets: ClassOptions,
    report: ReportOptions,
    rate: Annotated[float | None, _traffic(help="Requests per second to serve.")] = None,
    prompt_len: Annotated[str, _traffic(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.")] = "128:2048",
    output_len: Annotated[str, _traffic(metavar="LOW:HIGH", help="Output tokens, log-uniform.")] = "64:512",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Predict a model's memory and speed on a device, and the number of devices for a load.

    No weights are read, and only the scheduler runs.
    """
    from chairlift_lab.common.workload import LengthRange
    from chairlift_lab.planning.prediction import ReplicaSettings, decode_curve, highest_rate, plot_plan
    from chairlift_lab.simulator.step_cost import Roofline

    if rate is not None:
        above(0)("rate", rate)
    report.check()
    model, device, memory = machine.resolve()
    goal, named, cost = targets.resolve(), targets.named(), Roofline(model, device)
    n_in, n_out = LengthRange.parse("prompt_len", prompt_len), LengthRange.parse("output_len", output_len)
    longest = n_in.high + n_out.high
    middle = round(n_in.middle + n_out.middle / 2)
    largest = max(1, memory.requests_of(middle))
    curve = decode_curve(cost, middle, largest)
    with watch(enabled=not quiet) as note:
        note("searching for the highest rate")
        # The search is several times as fast with fixed chunks.
        order, budget = ("slack", "slack") if named else ("fcfs", "fixed")
        blocks, slots = memory.blocks_of_one_table(middle), min(largest, 1024)
        settings = ReplicaSettings(num_blocks=blocks, slots=slots, order=order, budget=budget)
        best = highest_rate(settings, cost, n_in, n_out, goal, named)
    fitting = [point for point in curve if goal.tpot is None or point.seconds <= goal.tpot]
    rows = [
        ["Weights", f"{model.weight_bytes / 1e9:.2f} GB, {model.num_parameters:,} of them"],
        ["KV cache per token", f"{model.kv_bytes_per_token:,} bytes"],
        ["KV cache", f"{memory.kv_bytes / 1e9:.1f} GB = {memory.num_blocks:,} blocks = {memory.num_tokens:,} tokens"],
        [f"Requests at {middle:,} tokens each", f"{largest:,}"],
        [f"Requests at {longest:,} tokens each", f"{memory.requests_of(longest):,}"],
        ["One request alone", f"{curve[0].tokens_per_second:,.0f} tokens/s"],
        ["All of them, decoding", f"{curve[-1].tokens_per_second:,.0f} tokens/s"],
    ]
    if memory.groups is not None:
        rows.insert(3, ["Layers", memory.groups.describe_groups()])
    if memory.num_states is not None:
        states = f"{model.state_bytes / 1e6:.1f} MB per request x {memory.num_states:,}"
        rows.insert(3, ["States of recurrent layers", states])
    if goal.tpot is not None:
        most = fitting[-1].batch if fitting else 0
        rows.append([f"Requests inside {goal.tpot * 1e3:g} ms per token", f"{most:,}"])
    label = "Highest rate inside the targets" if goal.given or named else "Highest rate"
    rows.append([label, f"{_rounded(best)} requests/s" if best else "none: not even one request"])
    replicas = None
    if rate is not None:
        replicas = math.ceil(rate / best) if best else None
        rows.append([f"Replicas for {rate:g} requests/s", f"{replicas:,}" if replicas else "cannot be reached"])
    caption = f"Predicted by a roofline; nothing was run. Order {settings.order}, budget {settings.budget_name}."
    show_table(f"{machine.model} on {device.name}", ["", ""], rows, caption)
    parameters = {
        "model": machine.model,
        "device": device.name,
        "dtype": machine.dtype,
        "kv_dtype": machine.kv_dtype,
        "prompt_len": str(n_in),
        "output_len": str(n_out),
        "rate": rate,
        "classes": [each.name for each in named],
    }
    row = {
        "name": machine.model,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_blocks": memory.num_blocks,
        "state_bytes": model.state_bytes,
        "largest_batch": largest,
        "tokens_per_s_alone": curve[0].tokens_per_second,
        "tokens_per_s_full": curve[-1].tokens_per_second,
        "highest_rate": best,
        "replicas": replicas,
    }
    title = f"{machine.model} on {device.name}"
    report.write("plan", parameters, [row], lambda path, here: plot_plan(path, title, curve, goal.tpot, here))

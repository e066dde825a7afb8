"""`chairlift simulate` and `chairlift plan`: predictions without a model."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.errors import InvalidParameter
from chairlift.options import above, at_least
from chairlift.progress import watch
from chairlift.terminal.options import given, refuse_given
from chairlift.terminal.tables import Line, comparison_table, recording_table, show_table
from chairlift_lab.planning.machine import MachineOptions, machine_option, times
from chairlift_lab.report.options import Count, ReportOptions, Settings

if TYPE_CHECKING:
    from chairlift.cluster.autoscaling import AutoscalingSettings
    from chairlift.cluster.routing.router import Router
    from chairlift.core.targets import Targets
    from chairlift_lab.simulator.outcome import Arrival
    from chairlift_lab.simulator.replica import Replica
    from chairlift_lab.simulator.step_cost import StepCost

RANDOM_REQUESTS = 1000
INGRESS_BY = ("turn", "tenant")
# The options that a report of a simulation has among its settings.
REPORTED = (
    *("replicas", "min_replicas", "max_replicas", "cold_start", "down_delay", "router", "ingresses", "ingress_by"),
    *(
        "policy",
        "order",
        "budget",
        "scheduler",
        "preemption",
        "rate",
        "trace",
        "copies",
        "spread",
        "trace_seconds",
        "block_size",
    ),
    *("requests", "seed"),
)

_target, _fleet, _traffic = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Targets", "Replicas", "Traffic")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions(Settings):
    target_ttft_ms: Annotated[float | None, above(0), _target(help="Time to first token.")] = None
    target_tpot_ms: Annotated[float | None, above(0), _target(help="Time per output token after the first.")] = None
    target_e2e_ms: Annotated[float | None, above(0), _target(help="Whole answer.")] = None

    def resolve(self) -> Targets:
        from chairlift.core.targets import Targets

        return Targets(*(times(value, 1e-3) for value in asdict(self).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions(Settings):
    replicas: Annotated[Count, _fleet(help="Number of engines, at the start.")] = 1
    router: Annotated[str, _fleet(help="round-robin, least-loaded, prefix-affine or new-tokens-batch.")] = (
        "least-loaded"
    )
    ingresses: Annotated[Count, _fleet(help="Ingresses, each with a router of its own.")] = 1
    ingress_by: Annotated[
        str, _fleet(help="Which ingress gets a request: turn, or tenant (by the first tokens of its prompt).")
    ] = "turn"
    max_replicas: Annotated[int | None, _fleet(help="Autoscale up to this many.", show_default="no scaling")] = None
    min_replicas: Annotated[int, _fleet(help="Autoscale down to this many.")] = 1
    cold_start: Annotated[float, _fleet(help="Seconds until a new replica answers.")] = 20.0
    down_delay: Annotated[
        float, _fleet(help="Seconds for which fewer replicas must suffice before any is removed.")
    ] = 120.0
    target_used: Annotated[float, _fleet(help="Share of KV blocks in use at which to add replicas.")] = 0.7
    price: Annotated[float | None, _fleet(help="Per replica and hour, for the cost of tokens.")] = None

    def check(self) -> None:
        if self.ingress_by not in INGRESS_BY:
            choices = ", ".join(INGRESS_BY)
            raise InvalidParameter("ingress_by", f"must be one of {choices}, got {self.ingress_by!r}")
        if self.ingress_by == "tenant":
            from chairlift.cluster.routing.policies import ROUTERS

            if self.ingresses == 1 or not ROUTERS.get(self.router).reads_prefixes:
                raise InvalidParameter("ingress_by", "tenant needs several ingresses and the router prefix-affine")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidParameter("max_replicas", f"must be at least replicas ({self.replicas})")
        if self.price is not None and not self.price >= 0:
            raise InvalidParameter("price", f"must not be negative, got {self.price}")

    def make_router(self) -> Router:
        from chairlift.cluster.routing.router import Router
        from chairlift_lab.simulator.simulation import Ingresses

        if self.ingresses == 1:
            return Router(self.router)
        return Ingresses(self.router, self.ingresses, by_tenant=self.ingress_by == "tenant")

    def autoscaling(self, targets: Targets) -> AutoscalingSettings | None:
        """The settings of the autoscaler; None if the number of replicas is fixed."""
        from chairlift.cluster.autoscaling import AutoscalingSettings

        if self.max_replicas is None:
            return None
        settings = AutoscalingSettings(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            target_used=self.target_used,
            target_tpot=targets.tpot,
            cold_start=self.cold_start,
            down_delay=self.down_delay,
        )
        return settings if targets.ttft is None else replace(settings, target_ttft=targets.ttft)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions(Settings):
    rate: Annotated[float, _traffic(help="Requests per second.")] = 4.0
    arrivals: Annotated[str, _traffic(help="poisson, bursty or uniform.")] = "poisson"
    requests: Annotated[
        int | None, at_least(1), _traffic(help="Number of requests.", show_default="1000, or the whole trace")
    ] = None
    prompt_len: Annotated[str, _traffic(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.")] = "16:512"
    output_len: Annotated[str, _traffic(metavar="LOW:HIGH", help="Output tokens, log-uniform.")] = "16:256"
    trace: Annotated[Path | None, _traffic(help="Recorded traffic instead (CSV or JSON lines, see bench serve).")] = (
        None
    )
    trace_speed: Annotated[float, _traffic(help="Speed-up of the trace.")] = 1.0
    copies: Annotated[Count, _traffic(help="The trace this many times, spread over its duration.")] = 1
    spread: Annotated[
        float | None, above(0), _traffic(help="Seconds of the trace over which the copies begin.", show_default="all")
    ] = None
    trace_seconds: Annotated[float | None, above(0), _traffic(help="End the traffic of the trace after this long.")] = (
        None
    )
    seed: Annotated[int, _traffic(help="The same seed gives the same traffic.")] = 0

    def draw(self) -> tuple[Iterator[Arrival], bool]:
        """The requests in order of time, and whether prompts share prefixes."""
        from chairlift_lab.common.workload import LengthRange
        from chairlift_lab.load.traces import Arrivals, load_trace
        from chairlift_lab.planning.prediction import random_arrivals, trace_arrivals

        if self.trace is None:
            for name in ("spread", "trace_seconds"):
                if getattr(self, name) is not None:
                    raise InvalidParameter(name, "needs --trace")
            n_in, n_out = (LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len"))
            arrivals, count = Arrivals.parse(self.rate, self.arrivals, None), self.requests or RANDOM_REQUESTS
            return random_arrivals(arrivals, n_in, n_out, count, self.seed), False
        entries = [entry.scaled(1.0, self.trace_speed) for entry in load_trace(self.trace)[: self.requests]]
        requests = trace_arrivals(entries, self.copies, spread=self.spread, seconds=self.trace_seconds)
        return requests, any(entry.blocks for entry in entries)


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift simulate --model llama3-8b --device h200 --rate 20 --target-ttft-ms 500 --target-tpot-ms 30",
        "chairlift simulate --trace traffic.csv --replicas 8 --router least-loaded --plot simulation.png",
        "chairlift simulate --policy static --requests 200",
    ],
)
def simulate(
    context: typer.Context,
    machine: MachineOptions,
    targets: TargetOptions,
    fleet: FleetOptions,
    report: ReportOptions,
    traffic: TrafficOptions,
    profile: Annotated[
        Path | None,
        machine_option(help="Step times as `chairlift bench profile` measured them, instead of a prediction."),
    ] = None,
    kv_blocks: Annotated[int | None, machine_option(help="Blocks of the KV cache, instead of what fits.")] = None,
    block_size: Annotated[int, machine_option(help="Tokens of a block.")] = 16,
    policy: Annotated[str, typer.Option(help="continuous, dynamic or static.")] = "continuous",
    order: Annotated[
        str, typer.Option(help="fcfs, priority, shortest, boost, cached, fair, fair-cached, edf or slack.")
    ] = "fcfs",
    budget: Annotated[
        str | None,
        typer.Option(help="fixed, knee, latency or slack.", show_default="slack with --order slack, else fixed"),
    ] = None,
    classes: Annotated[
        list[str] | None,
        _target(
            "--class",
            metavar="NAME=TARGETS",
            help="Requests with targets of their own, such as interactive=ttft:500,tpot:50,share:2; may be repeated.",
        ),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="chairlift, or vllm: the documented behaviour of vLLM's, for comparisons.")
    ] = "chairlift",
    preemption: Annotated[
        str, typer.Option(help="When memory runs out: recompute, swap (to the host) or auto (the cheaper).")
    ] = "recompute",
    swap_blocks: Annotated[
        int | None, typer.Option(help="Blocks in host memory.", show_default="as many as on the device")
    ] = None,
    max_batch_requests: Annotated[int, typer.Option(help="Maximum number of requests per step.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per step.")] = 8192,
    max_overtakes: Annotated[
        int | None,
        at_least(1),
        typer.Option(help="How often a request may be passed over.", show_default="16, or 512 with slack or edf"),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Reuse the KV blocks of shared prefixes.",
            show_default="if a trace marks shared prefixes",
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
    from chairlift.core.kv.swap import check_mode
    from chairlift.core.targets import parse_classes
    from chairlift_lab.planning.prediction import ReplicaSettings, assign_classes, plot_outcome
    from chairlift_lab.simulator.outcome import attainment, figures
    from chairlift_lab.simulator.simulation import AutoscaledSize
    from chairlift_lab.simulator.simulation import simulate as run
    from chairlift_lab.simulator.step_cost import MeasuredCost, Roofline

    at_least(1)("block_size", block_size)
    fleet.check()
    report.check()
    model, device, memory = machine.resolve(block_size)
    goal = targets.resolve()
    cost: StepCost = Roofline(model, device) if profile is None else MeasuredCost.load(profile)
    check_mode(preemption, swap_blocks)
    requests, shares_prefixes = traffic.draw()
    named = list(parse_classes(classes or ()).values())
    if named:
        if goal.given:
            raise InvalidParameter("classes", "have targets of their own; leave out --target-ttft-ms and the others")
        requests = assign_classes(requests, named, traffic.seed)
    settings = ReplicaSettings(
        num_blocks=kv_blocks or memory.num_blocks,
        block_size=block_size,
        slots=min(max_batch_requests, memory.num_states or max_batch_requests),
        max_batch_tokens=max_batch_tokens,
        policy=policy,
        order=order,
        budget=budget,
        target_tpot_ms=targets.target_tpot_ms if budget == "latency" else None,
        target_ttft_ms=targets.target_ttft_ms if budget == "latency" else None,
        max_overtakes=max_overtakes,
        preemption=preemption,
        swap_blocks=memory.num_blocks if swap_blocks is None else swap_blocks,
        block_bytes=block_size * model.kv_bytes_per_token,
        host_bytes_per_second=device.host_bytes_per_second,
        prefix_caching=shares_prefixes if prefix_caching is None else prefix_caching,
        scheduler=scheduler,
    )
    autoscaling = fleet.autoscaling(goal)
    largest = fleet.max_replicas or fleet.replicas

    def make_replica(index: int) -> Replica:
        # Different phases, so that the engines are not all slow at the same time.
        return settings.make(cost, index / largest % 1)

    router = fleet.make_router()
    size = AutoscaledSize(autoscaling, make_replica) if autoscaling else None
    engines = [make_replica(index) for index in range(fleet.replicas)]
    start = time.perf_counter()
    with watch(enabled=not quiet) as note, _no_garbage_collection():
        outcome = run(requests, engines, router, size=size, progress=lambda done: note(f"{done:,} requests"))
    wall = time.perf_counter() - start
    row = figures(outcome, goal) | {"wall_seconds": wall, "steps_per_wall_second": outcome.steps / wall}
    if fleet.price is not None:
        tokens = sum(record.n_out for record in outcome.records)
        row["cost_per_million_tokens"] = fleet.price * outcome.replica_seconds / 3600 / tokens * 1e6
    if named:
        row["classes"] = attainment(outcome.records)
    _show_figures(row, goal)
    parameters = {"model": machine.model, "device": device.name} | {name: context.params[name] for name in REPORTED}
    parameters["trace"] = str(traffic.trace) if traffic.trace else None
    report.write("simulate", parameters, [{"name": policy} | row], lambda path, here: plot_outcome(path, outcome, here))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
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
    from chairlift_lab.planning.served_recording import ServedRecording, latencies
    from chairlift_lab.report.options import write_report

    others = [name for name in context.params if name not in ("recording", "model", "json_file", "quiet")]
    refuse_given(context, others, "does not go with --recording: it determines what is simulated")
    report.check()
    run = ServedRecording.load(folder, machine.model if given(context, "model") else None)
    measured, rows = latencies(run.measured), list[dict[str, Any]]()
    outcomes, walls = {}, {}
    for scheduler in ("vllm", "chairlift"):
        start = time.perf_counter()
        outcomes[scheduler] = run.simulated(scheduler)
        walls[scheduler] = time.perf_counter() - start
    learned = run.simulated("chairlift", learn_lengths=True)
    predicted = {name: latencies(outcome.records) for name, outcome in outcomes.items()}
    for name, value in measured.items():
        theirs, ours = predicted["vllm"][name], predicted["chairlift"][name]
        rows.append(
            {"name": name, "measured": value, "vllm": theirs, "error": theirs / value - 1}
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
            ["Preemptions", f"{row['preemptions']:,}"],
            ["Virtual time", f"{row['seconds']:,.1f} s in {row['steps']:,} steps"],
            ["Real time", f"{row['wall_seconds']:.1f} s, {row['steps_per_wall_second']:,.0f} steps per second"],
        ],
    )


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift plan --model llama3-8b --device h200 --rate 50 --target-ttft-ms 500 --target-tpot-ms 30",
        "chairlift plan --model path/to/config.json --device l4 --dtype int8 --plot plan.png",
        "chairlift plan --device custom --bandwidth 900 --tflops 180 --memory 48",
    ],
)
def plan(
    machine: MachineOptions,
    targets: TargetOptions,
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
    goal, cost = targets.resolve(), Roofline(model, device)
    n_in, n_out = LengthRange.parse("prompt_len", prompt_len), LengthRange.parse("output_len", output_len)
    longest = n_in.high + n_out.high
    middle = round(math.sqrt(n_in.low * n_in.high) + math.sqrt(n_out.low * n_out.high) / 2)
    largest = max(1, memory.requests_of(middle))
    curve = decode_curve(cost, middle, largest)
    with watch(enabled=not quiet) as note:
        note("searching for the highest rate")
        settings = ReplicaSettings(num_blocks=memory.num_blocks, slots=min(largest, 1024))
        best = highest_rate(settings, cost, n_in, n_out, goal)
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
    if memory.num_states is not None:
        states = f"{model.state_bytes / 1e6:.1f} MB per request x {memory.num_states:,}"
        rows.insert(3, ["States of recurrent layers", states])
    if goal.tpot is not None:
        most = fitting[-1].batch if fitting else 0
        rows.append([f"Requests inside {goal.tpot * 1e3:g} ms per token", f"{most:,}"])
    label = "Highest rate inside the targets" if goal.given else "Highest rate"
    rows.append([label, f"{_rounded(best)} requests/s" if best else "none: not even one request"])
    replicas = None
    if rate is not None:
        replicas = math.ceil(rate / best) if best else None
        rows.append([f"Replicas for {rate:g} requests/s", f"{replicas:,}" if replicas else "cannot be reached"])
    show_table(f"{machine.model} on {device.name}", ["", ""], rows, "Predicted by a roofline; nothing was run")
    parameters = {
        "model": machine.model,
        "device": device.name,
        "dtype": machine.dtype,
        "kv_dtype": machine.kv_dtype,
        "prompt_len": str(n_in),
        "output_len": str(n_out),
        "rate": rate,
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

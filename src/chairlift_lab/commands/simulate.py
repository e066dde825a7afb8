"""`chairlift simulate` and `chairlift plan`: predictions without a model."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.errors import InvalidParameter
from chairlift.progress import watch
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import comparison_table, show_table
from chairlift_lab.planning.options import FleetOptions, MachineOptions, TargetOptions, machine_option
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from chairlift_lab.planning.run import MemoryBudget
    from chairlift_lab.simulator.figures import Targets
    from chairlift_lab.simulator.roofline import ModelShape

_traffic = partial(typer.Option, rich_help_panel="Traffic")

RANDOM_REQUESTS = 1000


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
    profile: Annotated[
        Path | None,
        machine_option(help="Step times as `chairlift bench profile` measured them, instead of a prediction."),
    ] = None,
    kv_blocks: Annotated[int | None, machine_option(help="Blocks of the KV cache, instead of what fits.")] = None,
    block_size: Annotated[int, machine_option(help="Tokens of a block.")] = 16,
    rate: Annotated[float, _traffic(help="Requests per second.")] = 4.0,
    arrivals: Annotated[str, _traffic(help="poisson, bursty or uniform.")] = "poisson",
    requests: Annotated[
        int | None, _traffic(help="Number of requests.", show_default="1000, or the whole trace")
    ] = None,
    prompt_len: Annotated[str, _traffic(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.")] = "16:512",
    output_len: Annotated[str, _traffic(metavar="LOW:HIGH", help="Output tokens, log-uniform.")] = "16:256",
    trace: Annotated[
        Path | None, _traffic(help="Recorded traffic instead (CSV or JSON lines, see bench serve).")
    ] = None,
    trace_speed: Annotated[float, _traffic(help="Speed-up of the trace.")] = 1.0,
    copies: Annotated[int, _traffic(help="The trace this many times, spread over its duration.")] = 1,
    spread: Annotated[
        float | None, _traffic(help="Seconds of the trace over which the copies begin.", show_default="all")
    ] = None,
    trace_seconds: Annotated[float | None, _traffic(help="End the traffic of the trace after this long.")] = None,
    seed: Annotated[int, _traffic(help="The same seed gives the same traffic.")] = 0,
    policy: Annotated[str, typer.Option(help="continuous, dynamic or static.")] = "continuous",
    order: Annotated[str, typer.Option(help="fcfs, priority, shortest or fair.")] = "fcfs",
    preemption: Annotated[
        str, typer.Option(help="When memory runs out: recompute, swap (to the host) or auto (the cheaper).")
    ] = "recompute",
    swap_blocks: Annotated[
        int | None, typer.Option(help="Blocks in host memory.", show_default="as many as on the device")
    ] = None,
    max_batch_requests: Annotated[int, typer.Option(help="Maximum number of requests per step.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per step.")] = 8192,
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
    from chairlift.core.kv.swap import check_mode
    from chairlift_lab.common.workload import LengthRange
    from chairlift_lab.load.arrivals import Arrivals
    from chairlift_lab.load.traces import load_trace
    from chairlift_lab.planning.plot import plot_outcome
    from chairlift_lab.planning.run import ReplicaSettings, load_profile, random_arrivals, trace_arrivals
    from chairlift_lab.simulator.figures import figures
    from chairlift_lab.simulator.fleet import AutoscaledSize
    from chairlift_lab.simulator.replica import Replica
    from chairlift_lab.simulator.roofline import Roofline, StepCost
    from chairlift_lab.simulator.run import simulate as run

    for name, count in (("requests", requests), ("copies", copies), ("block_size", block_size)):
        if count is not None and count < 1:
            raise InvalidParameter(name, f"must be at least 1, got {count}")
    for name, seconds in (("spread", spread), ("trace_seconds", trace_seconds)):
        if seconds is not None and not seconds > 0:
            raise InvalidParameter(name, f"must be above 0, got {seconds}")
        if seconds is not None and trace is None:
            raise InvalidParameter(name, "needs --trace")
    fleet.check()
    report.check()
    model, device, memory = machine.resolve(block_size)
    goal = targets.resolve()
    cost: StepCost = Roofline(model, device) if profile is None else load_profile(profile)
    check_mode(preemption, swap_blocks)
    settings = ReplicaSettings(
        num_blocks=kv_blocks or memory.num_blocks,
        block_size=block_size,
        seats=min(max_batch_requests, memory.num_states or max_batch_requests),
        max_batch_tokens=max_batch_tokens,
        policy=policy,
        order=order,
        preemption=preemption,
        swap_blocks=memory.num_blocks if swap_blocks is None else swap_blocks,
        block_bytes=block_size * model.kv_bytes_per_token,
        host_bytes_per_second=device.host_bytes_per_second,
    )
    if trace is not None:
        entries = [entry.scaled(1.0, trace_speed) for entry in load_trace(trace)[:requests]]
        coming = trace_arrivals(entries, copies, spread=spread, seconds=trace_seconds)
        settings = replace(settings, prefix_caching=any(entry.blocks for entry in entries))
    else:
        lengths = (LengthRange.parse("prompt_len", prompt_len), LengthRange.parse("output_len", output_len))
        coming = random_arrivals(Arrivals.parse(rate, arrivals, None), *lengths, requests or RANDOM_REQUESTS, seed)
    if prefix_caching is not None:
        settings = replace(settings, prefix_caching=prefix_caching)
    autoscaling = fleet.autoscaling(goal)
    largest = fleet.max_replicas or fleet.replicas

    def make_replica(index: int) -> Replica:
        # Different phases, so that the engines are not all slow at the same time.
        return settings.make(cost, index / largest % 1)

    router = fleet.make_router()
    size = AutoscaledSize(autoscaling, make_replica) if autoscaling else None
    engines = [make_replica(index) for index in range(fleet.replicas)]
    begun = time.perf_counter()
    with watch(enabled=not quiet) as note, _no_garbage_collection():
        outcome = run(coming, engines, router, size=size, progress=lambda done: note(f"{done:,} requests"))
    wall = time.perf_counter() - begun
    row = figures(outcome, goal) | {"wall_seconds": wall, "steps_per_wall_second": outcome.steps / wall}
    if fleet.price is not None:
        tokens = sum(record.n_out for record in outcome.records)
        row["cost_per_million_tokens"] = fleet.price * outcome.replica_seconds / 3600 / tokens * 1e6
    _show_figures(row, goal)
    named = (
        "replicas",
        "min_replicas",
        "max_replicas",
        "cold_start",
        "down_delay",
        "router",
        "ingresses",
        "ingress_by",
    )
    parameters = {"model": machine.model, "device": device.name} | {name: getattr(fleet, name) for name in named}
    parameters |= {"policy": policy, "order": order, "preemption": preemption}
    parameters |= {"rate": rate, "trace": str(trace) if trace else None, "copies": copies, "spread": spread}
    parameters |= {"trace_seconds": trace_seconds, "block_size": block_size, "requests": requests, "seed": seed}
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
    from chairlift_lab.report.json_report import write_report

    others = [name for name in context.params if name not in ("against", "json_file", "quiet")]
    refuse_given(context, others, "does not go with --against: the recording determines what is simulated")
    report.check()
    rows = compare(RecordedRun.load(against))
    comparison_table(rows).show()
    if report.json_file is not None:
        write_report(report.json_file, "simulate", {"against": str(against)}, rows)


def _rounded(value: float) -> str:
    """Write three significant digits without an exponent: 34,700."""
    number = float(f"{value:.3g}")
    return f"{number:,.0f}" if number >= 100 else f"{number:g}"


def _show_figures(row: dict[str, Any], goal: Targets) -> None:
    def latency(name: str) -> list[str]:
        values = (row[f"{name}_p{share}_ms"] for share in (50, 95, 99))
        return [name.upper(), *("-" if value is None else f"{value:,.1f}" for value in values)]

    price = row.get("cost_per_million_tokens")
    show_table("Latency, ms", ["", "p50", "p95", "p99"], [latency(name) for name in ("ttft", "tpot", "itl", "e2e")])
    show_table(
        "Service",
        ["", ""],
        [
            ["Requests per second", _rounded(row["requests_per_s"])],
            ["Output tokens per second", f"{row['output_tokens_per_s']:,.0f}"],
            *([["Within the targets", f"{row['good_share']:.1%}"]] if goal.given else []),
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
    from chairlift_lab.planning.plot import decode_curve, plot_plan
    from chairlift_lab.planning.run import ReplicaSettings, highest_rate
    from chairlift_lab.simulator.roofline import Roofline

    if rate is not None and not rate > 0:
        raise InvalidParameter("rate", f"must be above 0, got {rate}")
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
        settings = ReplicaSettings(num_blocks=memory.num_blocks, seats=min(largest, 1024))
        best = highest_rate(settings, cost, n_in, n_out, goal)
    fitting = [point for point in curve if goal.tpot is None or point.seconds <= goal.tpot]
    rows = [
        ["Weights", f"{model.weight_bytes / 1e9:.2f} GB, {model.num_parameters:,} of them"],
        ["KV cache per token", f"{model.kv_bytes_per_token:,} bytes"],
        ["KV cache", f"{memory.kv_bytes / 1e9:.1f} GB = {memory.num_blocks:,} blocks = {memory.num_tokens:,} tokens"],
        *_state_rows(model, memory),
        [f"Requests at {middle:,} tokens each", f"{largest:,}"],
        [f"Requests at {longest:,} tokens each", f"{memory.requests_of(longest):,}"],
        ["One request alone", f"{curve[0].tokens_per_second:,.0f} tokens/s"],
        ["All of them, decoding", f"{curve[-1].tokens_per_second:,.0f} tokens/s"],
    ]
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
    parameters: dict[str, Any] = {"model": machine.model, "device": device.name}
    parameters |= {"dtype": machine.dtype, "kv_dtype": machine.kv_dtype}
    parameters |= {"prompt_len": str(n_in), "output_len": str(n_out), "rate": rate}
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


def _state_rows(model: ModelShape, memory: MemoryBudget) -> list[list[str]]:
    if memory.num_states is None:
        return []
    return [["States of recurrent layers", f"{model.state_bytes / 1e6:.1f} MB per request x {memory.num_states:,}"]]

"""The options of `chairlift simulate` and `chairlift tune`: targets, replicas, traffic, settings of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.options import above, at_least
from chairlift_lab.planning.machine import MachineOptions, machine_option, times
from chairlift_lab.report.options import Count, Settings

if TYPE_CHECKING:
    from chairlift.cluster.autoscaling import AutoscalingSettings
    from chairlift.cluster.routing.router import Router
    from chairlift.core.targets import ServiceClass, Targets
    from chairlift_lab.load.trace_files import TraceEntry
    from chairlift_lab.planning.prediction import ReplicaSettings
    from chairlift_lab.simulator.outcome import Arrival
    from chairlift_lab.simulator.step_cost import StepCost

RANDOM_REQUESTS = 1000
INGRESS_BY = ("turn", "tenant")

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

        values = (self.target_ttft_ms, self.target_tpot_ms, self.target_e2e_ms)
        return Targets(*(times(value, 1e-3) for value in values))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOptions(TargetOptions):
    """Targets for all requests, or classes of requests with targets of their own."""

    classes: Annotated[
        list[str] | None,
        _target(
            "--class",
            metavar="NAME=TARGETS",
            help="Requests with targets of their own, such as interactive=ttft:500,tpot:50,share:2; may be repeated.",
        ),
    ] = None

    def named(self) -> list[ServiceClass]:
        from chairlift.core.targets import parse_classes

        named = list(parse_classes(self.classes or ()).values())
        if named and self.resolve().given:
            raise InvalidParameter("classes", "have targets of their own; leave out --target-ttft-ms and the others")
        return named

    def assign(self, requests: Iterator[Arrival], seed: int) -> Iterator[Arrival]:
        """Give each request a class, if there are any; requests of a log may have targets of their own."""
        from chairlift_lab.planning.prediction import assign_classes

        named = self.named()
        return assign_classes(requests, named, seed) if named else requests


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
    log: Annotated[
        Path | None,
        _traffic(metavar="FILE", help="Traffic of a server's --access-log instead, beside the times it measured."),
    ] = None
    trace_speed: Annotated[float, _traffic(help="Speed-up of the trace.")] = 1.0
    copies: Annotated[Count, _traffic(help="The trace this many times, spread over its duration.")] = 1
    spread: Annotated[
        float | None, above(0), _traffic(help="Seconds of the trace over which the copies begin.", show_default="all")
    ] = None
    trace_seconds: Annotated[float | None, above(0), _traffic(help="End the traffic of the trace after this long.")] = (
        None
    )
    seed: Annotated[int, _traffic(help="The same seed gives the same traffic.")] = 0

    def entries(self) -> list[TraceEntry]:
        """The requests of the trace or the log; none if there is neither."""
        from chairlift_lab.load.trace_files import load_trace

        if self.trace is not None and self.log is not None:
            raise InvalidParameter("log", "was given together with trace; give one")
        source = self.trace or self.log
        if source is None:
            return []
        loaded = load_trace(source, "trace" if self.trace else "log")[: self.requests]
        return [entry.scaled(1.0, self.trace_speed) for entry in loaded]

    def typical_length(self, entries: Sequence[TraceEntry]) -> int:
        """The tokens of a typical request of the trace, or of random ones."""
        from chairlift_lab.common.workload import LengthRange

        if entries:
            return mean_length(entries)
        n_in, n_out = (LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len"))
        return round(n_in.middle + n_out.middle / 2)

    def draw(self, entries: list[TraceEntry]) -> Iterator[Arrival]:
        """The requests in order of time: those of `entries`, or random ones."""
        from chairlift_lab.common.workload import LengthRange
        from chairlift_lab.load.traces import Arrivals
        from chairlift_lab.planning.prediction import random_arrivals, trace_arrivals

        if entries:
            return trace_arrivals(entries, self.copies, spread=self.spread, seconds=self.trace_seconds)
        for name in ("spread", "trace_seconds"):
            if getattr(self, name) is not None:
                raise InvalidParameter(name, "needs --trace")
        n_in, n_out = (LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len"))
        arrivals, count = Arrivals.parse(self.rate, self.arrivals, None), self.requests or RANDOM_REQUESTS
        return random_arrivals(arrivals, n_in, n_out, count, self.seed)


def mean_length(entries: Sequence[TraceEntry]) -> int:
    """The tokens of a typical request while it runs: its prompt and half of its output."""
    return max(1, round(sum(entry.n_in + entry.n_out / 2 for entry in entries) / len(entries)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions(Settings):
    """One engine: the times of its steps, its cache and its scheduler."""

    profile: Annotated[
        Path | None,
        machine_option(help="Step times as `chairlift bench profile` measured them, instead of a prediction."),
    ] = None
    kv_blocks: Annotated[
        int | None, at_least(1), machine_option(help="Blocks of the KV cache, instead of what fits.")
    ] = None
    block_size: Annotated[Count, machine_option(help="Tokens of a block.")] = 16
    policy: Annotated[str, typer.Option(help="continuous, dynamic or static.")] = "continuous"
    order: Annotated[
        str, typer.Option(help="fcfs, priority, shortest, boost, cached, fair, fair-cached, edf or slack.")
    ] = "fcfs"
    budget: Annotated[
        str | None,
        typer.Option(
            help="fixed, knee, latency or slack. fixed is predicted the fastest.",
            show_default="as servers: slack with --order slack, else knee",
        ),
    ] = None
    scheduler: Annotated[
        str, typer.Option(help="chairlift, or vllm: the documented behaviour of vLLM's, for comparisons.")
    ] = "chairlift"
    preemption: Annotated[
        str, typer.Option(help="When memory runs out: recompute, swap (to the host) or auto (the cheaper).")
    ] = "recompute"
    swap_blocks: Annotated[
        int | None, typer.Option(help="Blocks in host memory.", show_default="as many as on the device")
    ] = None
    max_batch_requests: Annotated[Count, typer.Option(help="Maximum number of requests per step.")] = 256
    max_batch_tokens: Annotated[Count, typer.Option(help="Maximum number of tokens per step.")] = 8192
    max_prefill_tokens: Annotated[
        int | None,
        at_least(1),
        typer.Option(help="Maximum number of prompt tokens per step.", show_default="as --max-batch-tokens"),
    ] = None
    max_overtakes: Annotated[
        int | None,
        at_least(1),
        typer.Option(help="How often a request may be passed over.", show_default="16, or 512 with slack or edf"),
    ] = None
    learn_lengths: Annotated[
        bool,
        typer.Option(
            "--learn-lengths/--no-learn-lengths", help="Learn the lengths of outputs; otherwise they are known."
        ),
    ] = False
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Reuse the KV blocks of shared prefixes.",
            show_default="if a trace marks shared prefixes",
        ),
    ] = None

    def settings(
        self, machine: MachineOptions, targets: TargetOptions, entries: Sequence[TraceEntry], length: int | None = None
    ) -> tuple[ReplicaSettings, StepCost]:
        """The settings of one replica for the requests of a trace, or for others of about `length` tokens, and what its
        steps cost."""
        from chairlift.core.kv.swap import check_mode
        from chairlift_lab.planning.prediction import ReplicaSettings
        from chairlift_lab.simulator.step_cost import MeasuredCost, Roofline

        model, device, memory = machine.resolve(self.block_size)
        cost: StepCost = Roofline(model, device) if self.profile is None else MeasuredCost.load(self.profile)
        check_mode(self.preemption, self.swap_blocks)
        by_latency = self.budget == "latency"
        shares_prefixes = any(entry.blocks for entry in entries)
        num_blocks = self.kv_blocks or memory.blocks_of_one_table(length or mean_length(entries))
        settings = ReplicaSettings(
            num_blocks=num_blocks,
            block_size=self.block_size,
            slots=min(self.max_batch_requests, memory.num_states or self.max_batch_requests),
            max_batch_tokens=self.max_batch_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            policy=self.policy,
            order=self.order,
            budget=self.budget,
            target_tpot_ms=targets.target_tpot_ms if by_latency else None,
            target_ttft_ms=targets.target_ttft_ms if by_latency else None,
            max_overtakes=self.max_overtakes,
            preemption=self.preemption,
            swap_blocks=num_blocks if self.swap_blocks is None else self.swap_blocks,
            block_bytes=self.block_size * model.kv_bytes_per_token,
            host_bytes_per_second=device.host_bytes_per_second,
            prefix_caching=shares_prefixes if self.prefix_caching is None else self.prefix_caching,
            scheduler=self.scheduler,
            learn_lengths=self.learn_lengths,
        )
        return settings, cost

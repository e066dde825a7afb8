"""Replicas and traffic of `chairlift simulate` and `chairlift plan`, and the search for the highest rate."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from chairlift.cluster.routing.router import Router
from chairlift.core.budgets.base import OFFLINE, ONLINE, FixedBudget, default_budget, make_budget
from chairlift.core.cost_model import CostModel, StepShape, WorkForecast, chunk_kv
from chairlift.core.kv.swap import SwapCost, SwapSpace, check_mode
from chairlift.core.lengths import OutputLengths
from chairlift.core.orderings.base import make_ordering
from chairlift.core.policies.base import make_policy
from chairlift.core.scheduler.tenant_isolation import make_tenant_isolation
from chairlift.core.targets import ServiceClass, Targets
from chairlift.errors import InvalidParameter
from chairlift_lab.common.workload import LengthRange
from chairlift_lab.load.trace_files import TraceEntry
from chairlift_lab.load.traces import Arrivals
from chairlift_lab.planning.machine import BLOCK_SIZE
from chairlift_lab.report.options import save_panels
from chairlift_lab.simulator.outcome import Arrival, RequestRecord, SimulationOutcome, attainment, percentile
from chairlift_lab.simulator.replica import Replica
from chairlift_lab.simulator.scheduler import SimulatedKVCache, SimulatedScheduler
from chairlift_lab.simulator.simulation import simulate
from chairlift_lab.simulator.step_cost import MeasuredCost, SpeedCursor, StepCost
from chairlift_lab.simulator.vllm_scheduler import VLLMScheduler

SCHEDULERS = {"chairlift": SimulatedScheduler, "vllm": VLLMScheduler}
VLLM_SETTINGS = ("continuous", "fcfs", "fixed", "recompute")
ALL_AT_ONCE = 1e9  # requests per second
BLOCKS_PER_COPY = 2**20  # room for the prefix blocks of one copy of a trace
OWN_TOKENS = 2**31  # first token id that is unique to one request


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The options of a simulated server; what is None is chosen as a server chooses it."""

    num_blocks: int
    block_size: int = BLOCK_SIZE
    slots: int = 256
    max_batch_tokens: int = 8192
    max_prefill_tokens: int | None = None
    policy: str = "continuous"
    order: str = "fcfs"
    budget: str | None = None
    target_tpot_ms: float | None = None  # This and the next one are for the budget `latency`.
    target_ttft_ms: float | None = None
    max_overtakes: int | None = None
    prefix_caching: bool = False
    preemption: str = "recompute"
    swap_blocks: int = 0  # room for blocks in host memory
    block_bytes: int = 0  # size of a block, for the time of swaps
    host_bytes_per_second: float = 25e9
    scheduler: str = "chairlift"
    learn_lengths: bool = False

    def make(self, cost: StepCost, begin: float = 0.0) -> Replica:
        """Build a replica; `begin` is the share of a measured speed trace at which it starts."""
        if self.scheduler not in SCHEDULERS:
            problem = f"there is no {self.scheduler!r}; choose from {', '.join(SCHEDULERS)}"
            raise InvalidParameter("scheduler", problem)
        ordering, name = make_ordering(self.order), self.budget_name
        if self.scheduler == "vllm" and (self.policy, self.order, name, self.preemption) != VLLM_SETTINGS:
            raise InvalidParameter("scheduler", f"vllm has only {', '.join(VLLM_SETTINGS)}")
        most = min(self.max_prefill_tokens or self.max_batch_tokens, self.max_batch_tokens)
        learned = CostModel()
        budget = make_budget(
            name,
            learned,
            max_batch_tokens=self.max_batch_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            target_tpot_ms=self.target_tpot_ms,
            target_ttft_ms=self.target_ttft_ms,
        )
        learns = ordering.uses_targets or not isinstance(budget, FixedBudget)
        scheduler = SCHEDULERS[self.scheduler](
            SimulatedKVCache(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching),
            budget,
            make_policy(self.policy),
            self.slots,
            ordering=ordering,
            max_overtakes=self.max_overtakes,
            forecast=WorkForecast(learned, most) if learns else None,
            tenant_isolation=make_tenant_isolation(ordering, cost.predict, most),
            swap=self._swap_space(cost, most),
            lengths=OutputLengths(knows_limits=False) if self.learn_lengths else None,
        )
        pace = cost.pace if isinstance(cost, MeasuredCost) else None
        return Replica(
            scheduler,
            cost,
            seconds_per_swap=self.block_bytes / self.host_bytes_per_second,
            speed=SpeedCursor(pace, begin) if pace else None,
            learned=learned if learns else None,
        )

    @property
    def budget_name(self) -> str:
        """The budget, which is that of a server unless one is named; the steps of vLLM are fixed."""
        if self.budget is not None:
            return self.budget
        has_target = self.target_tpot_ms is not None or self.target_ttft_ms is not None
        otherwise = OFFLINE if self.scheduler == "vllm" else ONLINE
        return default_budget(make_ordering(self.order).own_budget, has_target=has_target, otherwise=otherwise)

    def _swap_space(self, cost: StepCost, chunk: int) -> SwapSpace:
        check_mode(self.preemption, None)
        match self.preemption:
            case "recompute":
                return SwapSpace()
            case "swap":
                return SwapSpace(self.swap_blocks)
            case _:
                price = SwapCost(
                    self.block_bytes, self.host_bytes_per_second, _Recompute(cost, chunk).recompute_seconds
                )
                return SwapSpace(self.swap_blocks, price)


@dataclass(frozen=True, slots=True)
class _Recompute:
    """Cost of recomputing a victim's tokens in chunks of steps that run anyway."""

    cost: StepCost
    chunk: int

    def recompute_seconds(self, tokens: int) -> float:
        empty = self.cost.predict(StepShape())
        seconds = 0.0
        for done in range(0, tokens, self.chunk):
            count = min(self.chunk, tokens - done)
            shape = StepShape(prefill_tokens=count, prefill_kv=chunk_kv(done, count), requests=1)
            seconds += self.cost.predict(shape) - empty
        return seconds


def random_arrivals(
    arrivals: Arrivals, n_in: LengthRange, n_out: LengthRange, count: int, seed: int
) -> Iterator[Arrival]:
    rng = random.Random(f"simulation {seed}")
    for index, time in enumerate(islice(arrivals.times(seed), count)):
        yield Arrival(time, [index] * n_in.draw(rng), n_out.draw(rng))


def assign_classes(arrivals: Iterable[Arrival], classes: Sequence[ServiceClass], seed: int) -> Iterator[Arrival]:
    """Give each request a class at random, by the shares of the classes."""
    rng, shares = random.Random(f"classes {seed}"), [each.share for each in classes]
    for arrival in arrivals:
        yield replace(arrival, service_class=rng.choices(classes, shares)[0])


def trace_arrivals(
    entries: list[TraceEntry], copies: int = 1, *, spread: float | None = None, seconds: float | None = None
) -> Iterator[Arrival]:
    """Arrivals of a trace; equal prefix blocks get equal tokens.

    Several copies begin at different places of the first `spread` seconds of the trace (of all of it by default), which
    is then taken as a circle; prompts of different copies share nothing. `seconds` ends the traffic early.
    """
    period = entries[-1].at + entries[-1].at / len(entries)
    part = period if spread is None else min(spread, period)
    circles = (_circle(entries, copy / copies * part, period, copy) for copy in range(copies))
    for index, (time, entry, copy) in enumerate(heapq.merge(*circles, key=lambda item: item[0])):
        if seconds is not None and time > seconds:
            return
        prompt: list[int] = []
        for block in entry.blocks:
            prompt.extend([copy * BLOCKS_PER_COPY + block] * entry.block_tokens)
        prompt.extend([OWN_TOKENS + index] * (entry.n_in - len(prompt)))
        own = ServiceClass(entry.class_name or str(entry.targets), entry.targets) if entry.targets.given else None
        yield Arrival(time, prompt[: entry.n_in], entry.n_out, entry.tenant, own)


def _circle(
    entries: list[TraceEntry], begin: float, period: float, copy: int
) -> Iterator[tuple[float, TraceEntry, int]]:
    """(time, entry, copy) of a whole trace that begins at time `begin` of it."""
    first = bisect_left(entries, begin, key=lambda entry: entry.at)
    for entry in islice(entries, first, None):
        yield entry.at - begin, entry, copy
    for entry in islice(entries, first):
        yield entry.at - begin + period, entry, copy


def highest_rate(
    settings: ReplicaSettings,
    cost: StepCost,
    n_in: LengthRange,
    n_out: LengthRange,
    targets: Targets,
    classes: Sequence[ServiceClass] = (),
    *,
    count: int = 400,
    seed: int = 0,
) -> float:
    """Highest rate that one replica sustains and at which 95% of requests meet each target, or 95% of each class all of
    its own; 0 if there is none."""
    ceiling = saturated_rate(settings, cost, n_in, n_out, seed=seed)
    if not targets.given and not classes:
        return ceiling

    def keeps(rate: float) -> bool:
        arrivals = random_arrivals(Arrivals(rate, 1.0), n_in, n_out, count, seed)
        if classes:
            arrivals = assign_classes(arrivals, classes, seed)
        records = simulate_alone(arrivals, settings.make(cost)).records
        if any(each["good_share"] < 0.95 for each in attainment(records).values()):
            return False
        for name in ("ttft", "tpot", "e2e"):
            limit = getattr(targets, name)
            values = [value for record in records if (value := getattr(record, name)) is not None]
            if limit is not None and values and percentile(values, 95) > limit:
                return False
        return True

    first = next(random_arrivals(Arrivals(1.0, 1.0), n_in, n_out, 1, 0))
    seconds_alone = simulate_alone([first], settings.make(cost)).seconds
    low, high = 0.0, min(ceiling, 1 / max(1e-6, seconds_alone))
    if not keeps(high * 1e-3):
        return 0.0
    while keeps(high):
        if high == ceiling:
            return ceiling
        low, high = high, min(2 * high, ceiling)
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def saturated_rate(
    settings: ReplicaSettings, cost: StepCost, n_in: LengthRange, n_out: LengthRange, *, seed: int = 0
) -> float:
    """Requests per second of one replica while its queue is never empty."""
    # The first and the last quarter end while the batch fills or drains.
    quarter = max(100, settings.slots)
    arrivals = random_arrivals(Arrivals(ALL_AT_ONCE, 1.0), n_in, n_out, 4 * quarter, seed)
    outcome = simulate_alone(arrivals, settings.make(cost))
    ends = sorted(record.arrival + record.e2e for record in outcome.records)
    return 2 * quarter / (ends[3 * quarter] - ends[quarter])


def simulate_alone(
    arrivals: Iterable[Arrival], replica: Replica, on_end: Callable[[RequestRecord], object] = lambda record: None
) -> SimulationOutcome:
    """Simulate one replica without a choice of the router."""
    return simulate(arrivals, [replica], Router("round-robin"), on_end=on_end)


# ---- pictures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch size of the curve."""

    batch: int  # requests, each of which decodes one token
    seconds: float  # the duration of the step

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def decode_curve(cost: StepCost, context: int, largest: int) -> list[DecodePoint]:
    """Decode steps of 1, 2, 4, … `largest` requests with `context` tokens each."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    shapes = (StepShape(decode_tokens=size, decode_kv=size * context, requests=size) for size in sizes)
    return [DecodePoint(shape.requests, cost.predict(shape)) for shape in shapes]


def plot_plan(path: Path, title: str, curve: Sequence[DecodePoint], target: float | None, footnote: str) -> None:
    """Throughput and time per token by batch size; `target` is in seconds per token."""
    batches = [point.batch for point in curve]

    def throughput(axes: Any) -> None:
        axes.set_title("Output tokens per second")
        axes.plot(batches, [point.tokens_per_second for point in curve], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("requests in the batch")

    def time_per_token(axes: Any) -> None:
        axes.set_title("Milliseconds per token")
        axes.plot(batches, [1e3 * point.seconds for point in curve], marker="o", color="tab:orange")
        if target is not None:
            axes.axhline(1e3 * target, color="grey", linestyle="--", label="target")
            axes.legend(fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests in the batch")
        axes.set_ylim(bottom=0)

    save_panels(path, title, footnote, [throughput, time_per_token])


def plot_outcome(path: Path, outcome: SimulationOutcome, footnote: str) -> None:
    """The distribution of latencies, and the number of unfinished requests over time."""
    records = outcome.records

    def latencies(axes: Any) -> None:
        axes.set_title("Share of requests within a latency")
        shares = [(index + 1) / len(records) for index in range(len(records))]
        axes.plot(sorted(record.ttft for record in records), shares, label="first token")
        axes.plot(sorted(record.e2e for record in records), shares, label="end to end")
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_ylabel("share")
        axes.legend(fontsize=8)

    def unfinished(axes: Any) -> None:
        axes.set_title("Unfinished requests")
        axes.step(*unfinished_requests(records), where="post", linewidth=0.8)
        axes.set_xlabel("seconds")

    save_panels(path, "Simulation", footnote, [latencies, unfinished])


def unfinished_requests(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """The times at which a request arrives or ends, and how many are unfinished from then on."""
    changes = [(record.arrival, 1) for record in records] + [(record.arrival + record.e2e, -1) for record in records]
    changes.sort()
    return [time for time, _ in changes], list(accumulate(change for _, change in changes))

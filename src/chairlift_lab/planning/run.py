"""`chairlift simulate` and `chairlift plan`: traffic, replicas, and the search for the highest rate."""

from __future__ import annotations

import heapq
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from chairlift.cluster.routing.router import Router
from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.cost_model import StepShape, chunk_kv
from chairlift.core.kv.swap import SwapCost, SwapSpace, check_mode
from chairlift.core.orderings.base import make_ordering
from chairlift.core.policies.base import make_policy
from chairlift.core.scheduler.tenant_isolation import make_tenant_isolation
from chairlift.errors import InvalidParameter
from chairlift.options.config_file import read_text
from chairlift_lab.common.workload import LengthRange
from chairlift_lab.load.arrivals import Arrivals
from chairlift_lab.load.traces import HASHED_TOKENS, TraceEntry
from chairlift_lab.simulator.devices import Device
from chairlift_lab.simulator.figures import Targets, percentile
from chairlift_lab.simulator.kv_cache import SimulatedKVCache
from chairlift_lab.simulator.measured import MeasuredCost
from chairlift_lab.simulator.records import Arrival
from chairlift_lab.simulator.replica import Replica
from chairlift_lab.simulator.roofline import ModelShape, StepCost
from chairlift_lab.simulator.run import simulate
from chairlift_lab.simulator.scheduler import SimulatedScheduler
from chairlift_lab.simulator.speed_profile import SpeedCursor

SHARE_OF_MEMORY = 0.9  # the rest is for activations
ALL_AT_ONCE = 1e9  # requests per second
BLOCK_SIZE = 16
SHARE_OF_STATES = 0.5  # the largest share of what the weights leave, as in `engine/memory_plan.py`
MOST_REQUESTS = 256  # the most requests of one replica
BLOCKS_PER_COPY = 2**20  # room for the prefix blocks of one copy of a trace
OWN_TOKENS = 2**31  # first token id that is unique to one request


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    num_blocks: int
    block_size: int = BLOCK_SIZE
    seats: int = 256
    max_batch_tokens: int = 8192
    max_prefill_tokens: int | None = None
    policy: str = "continuous"
    order: str = "fcfs"
    prefix_caching: bool = False
    preemption: str = "recompute"
    swap_blocks: int = 0  # room for blocks in host memory
    block_bytes: int = 0  # size of a block, for the time of swaps
    host_bytes_per_second: float = 25e9

    def make(self, cost: StepCost, begin: float = 0.0) -> Replica:
        """Build a replica; `begin` is the share of a measured speed trace at which it starts."""
        ordering = make_ordering(self.order)
        most = min(self.max_prefill_tokens or self.max_batch_tokens, self.max_batch_tokens)
        scheduler = SimulatedScheduler(
            SimulatedKVCache(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching),
            FixedBudget.of(self.max_batch_tokens, self.max_prefill_tokens),
            make_policy(self.policy),
            self.seats,
            ordering=ordering,
            tenant_isolation=make_tenant_isolation(ordering, cost, most),
            swap=self._swap_space(cost, most),
        )
        pace = cost.pace if isinstance(cost, MeasuredCost) else None
        return Replica(
            scheduler,
            cost,
            seconds_per_swap=self.block_bytes / self.host_bytes_per_second,
            speed=SpeedCursor(pace, begin) if pace else None,
        )

    def _swap_space(self, cost: StepCost, chunk: int) -> SwapSpace:
        check_mode(self.preemption, None)
        if self.preemption == "recompute":
            return SwapSpace()
        if self.preemption == "swap":
            return SwapSpace(self.swap_blocks)
        price = SwapCost(self.block_bytes, self.host_bytes_per_second, _Recompute(cost, chunk))
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


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Split of a device's memory."""

    weight_bytes: float
    kv_bytes: float
    num_blocks: int
    num_tokens: int
    num_states: int | None = None  # sequences whose recurrent states fit; None: the model has no recurrent layers

    @classmethod
    def of(
        cls, model: ModelShape, device: Device, block_size: int = BLOCK_SIZE, most_requests: int = MOST_REQUESTS
    ) -> MemoryBudget:
        """The states of up to `most_requests` requests get at most half of what the weights leave."""
        left = device.memory_bytes * SHARE_OF_MEMORY - model.weight_bytes
        states = None
        if model.state_bytes:
            states = min(most_requests, int(left * SHARE_OF_STATES // model.state_bytes))
            left -= max(0, states) * model.state_bytes
        blocks = int(left // max(1, model.kv_bytes_per_token * block_size))
        if blocks < 1 or states == 0:
            problem = (
                f"{device.memory_bytes / 1e9:.0f} GB leave no room beside {model.weight_bytes / 1e9:.1f} GB of weights"
            )
            needed = cls.devices_needed(model, device, block_size)
            solution = f"it needs {needed} such devices, a larger one, or a smaller type of weights"
            raise InvalidParameter("device", f"{problem}; {solution}")
        return cls(model.weight_bytes, left, blocks, blocks * block_size, states)

    def requests_of(self, length: int) -> int:
        """How many requests of `length` tokens fit."""
        fitting = self.num_tokens // length
        return fitting if self.num_states is None else min(fitting, self.num_states)

    @staticmethod
    def devices_needed(model: ModelShape, device: Device, block_size: int = BLOCK_SIZE) -> int:
        """The number of devices that hold the weights and at least one block of the cache, split evenly."""
        least = model.weight_bytes + model.kv_bytes_per_token * block_size + model.state_bytes / SHARE_OF_STATES
        return max(1, math.ceil(least / (device.memory_bytes * SHARE_OF_MEMORY)))


def load_profile(path: Path) -> MeasuredCost:
    """Load the prices of `chairlift bench profile`."""
    try:
        return MeasuredCost.from_json(json.loads(read_text(path, "profile"))["prices"])
    except (OSError, ValueError, KeyError, TypeError, InvalidParameter) as error:
        raise InvalidParameter("profile", f"cannot read {str(path)!r} ({error})") from None


def random_arrivals(
    arrivals: Arrivals, n_in: LengthRange, n_out: LengthRange, count: int, seed: int
) -> Iterator[Arrival]:
    rng = random.Random(f"simulation {seed}")
    for index, at in enumerate(islice(arrivals.times(seed), count)):
        length = n_in.draw(rng)
        yield Arrival(at, [index] * length, n_out.draw(rng))


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
    for index, (at, entry, copy) in enumerate(heapq.merge(*circles, key=lambda item: item[0])):
        if seconds is not None and at > seconds:
            return
        prompt: list[int] = []
        for block in entry.blocks:
            prompt.extend([copy * BLOCKS_PER_COPY + block] * HASHED_TOKENS)
        prompt.extend([OWN_TOKENS + index] * (entry.n_in - len(prompt)))
        yield Arrival(at, prompt[: entry.n_in], entry.n_out)


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
    *,
    count: int = 400,
    seed: int = 0,
) -> float:
    """Highest rate that one replica sustains and at which 95% of requests meet each target; 0 if there is none."""
    ceiling = saturated_rate(settings, cost, n_in, n_out, seed=seed)
    if not targets.given:
        return ceiling

    def keeps(rate: float) -> bool:
        coming = random_arrivals(Arrivals(rate, 1.0), n_in, n_out, count, seed)
        outcome = simulate(coming, [settings.make(cost)], Router("round-robin"))
        for limit, values in (
            (targets.ttft, [record.ttft for record in outcome.records]),
            (targets.tpot, [record.tpot for record in outcome.records if record.tpot is not None]),
            (targets.e2e, [record.e2e for record in outcome.records]),
        ):
            if limit is not None and values and percentile(values, 95) > limit:
                return False
        return True

    low, high = 0.0, min(ceiling, 1 / max(1e-6, _alone(settings, cost, n_in, n_out)))
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
    quarter = max(100, settings.seats)
    coming = random_arrivals(Arrivals(ALL_AT_ONCE, 1.0), n_in, n_out, 4 * quarter, seed)
    outcome = simulate(coming, [settings.make(cost)], Router("round-robin"))
    ends = sorted(record.arrival + record.e2e for record in outcome.records)
    return 2 * quarter / (ends[3 * quarter] - ends[quarter])


def _alone(settings: ReplicaSettings, cost: StepCost, n_in: LengthRange, n_out: LengthRange) -> float:
    """Seconds of a typical request without others."""
    arrival = next(random_arrivals(Arrivals(1.0, 1.0), n_in, n_out, 1, 0))
    return simulate([arrival], [settings.make(cost)], Router("round-robin")).seconds

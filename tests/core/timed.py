"""A scheduler on a clock of its own: steps take what a known formula says, times noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from chairlift.core.budgets.base import make_budget
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import BudgetDecided, Event, TokenProduced
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.policies.continuous import ContinuousPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from tests.core.driving import make_request, run_plan

Truth = Callable[[StepShape], float]
Noise = Callable[[], float]


def cpu_like(shape: StepShape) -> float:
    """A small model on two cores: every token costs arithmetic."""
    kv = 1e-6 * shape.prefill_kv + 9e-6 * shape.decode_kv
    return 0.03 + 0.002 * shape.tokens + 0.0005 * shape.requests + kv


def gpu_like(shape: StepShape) -> float:
    """A large model on a large device: up to 128 tokens cost no more than reading the weights."""
    kv = 2e-9 * shape.prefill_kv + 3e-8 * shape.decode_kv
    return 0.003 + 2.3e-5 * max(0, shape.tokens - 128) + 2e-5 * shape.requests + kv


def steady() -> float:
    return 1.0


def jitter(seed: int, sigma: float = 0.04, pauses: float = 0.003) -> Noise:
    """Steps vary by `sigma`, and some take three to ten times as long: a garbage collection, a neighbour."""
    source = random.Random(seed)

    def one() -> float:
        pause = source.uniform(3, 10) if source.random() < pauses else 1.0
        return pause * math.exp(source.gauss(0, sigma))

    return one


@dataclass
class TimedRun:
    """What came of a run."""

    times: dict[str, list[float]] = field(default_factory=dict)  # of the tokens of each request
    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    decisions: list[BudgetDecided] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokenProduced):
                self.times.setdefault(event.request_id, []).append(event.time)
            elif isinstance(event, BudgetDecided):
                self.decisions.append(event)

    def gaps(self, prefix: str = "") -> list[float]:
        """Inter-token times of the requests whose names begin so."""
        return [b - a for name, times in self.times.items() if name.startswith(prefix) for a, b in pairwise(times)]

    def busy_tokens_per_second(self) -> float:
        """While prompts were computed beside decodes."""
        busy = [step for step in self.steps if step[0].prefill_tokens and step[0].decode_tokens]
        return sum(shape.tokens for shape, _ in busy) / sum(seconds for _, seconds in busy)

    def first_token(self, name: str) -> float:
        return self.times[name][0]


def timed_scheduler(
    cost: CostModel, budget: str | None = None, slots: int = 64, cap: int = 512, **options: float | None
) -> Scheduler:
    made = make_budget(budget, cost, max_batch_tokens=cap + slots, max_prefill_tokens=cap, **options)  # type: ignore[arg-type]
    return Scheduler(KVCache(20_000, 16, prefix_caching=False), made, ContinuousPolicy(), slots)


def run_timed(
    scheduler: Scheduler,
    cost: CostModel,
    arrivals: Sequence[tuple[float, Request]],
    truth: Truth = cpu_like,
    noise: Noise = steady,
) -> TimedRun:
    """Serve requests that come at the times given (in order), the cost model learning from every step."""
    result, now, coming = TimedRun(), 0.0, list(arrivals)
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            time, request = coming.pop(0)
            request.arrival = time
            scheduler.submit(request, now)
        plan = scheduler.schedule(now)
        shape = StepShape.of(plan)
        seconds = truth(shape) * noise()
        now += seconds
        scheduler.apply(run_plan(plan), now)
        cost.observe(shape, seconds)
        result.steps.append((shape, seconds))
        result.note(scheduler.drain_events())
    result.seconds = now
    return result


Arrivals = list[tuple[float, Request]]


def long_prompts_among_decodes(long_prompts: int, start: float, every: float, decodes: int = 8) -> Arrivals:
    """Some requests that generate all the while, and long prompts that arrive meanwhile."""
    running = [(0.0, make_request(f"run{i}", 40, new=600)) for i in range(decodes)]
    return running + [(start + every * i, make_request(f"long{i}", 1500, new=2)) for i in range(long_prompts)]

"""Runs a scheduler on a virtual clock, with step durations from a formula times noise."""

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
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from tests.core.driving import make_request, run_plan

Truth = Callable[[StepShape], float]
Noise = Callable[[], float]


def cpu_like(shape: StepShape) -> float:
    """Step time of a small model on two cores: every token adds arithmetic."""
    kv = 1e-6 * shape.prefill_kv + 9e-6 * shape.decode_kv
    return 0.03 + 0.002 * shape.tokens + 0.0005 * shape.requests + kv


def gpu_like(shape: StepShape) -> float:
    """Step time of a large model on a GPU: up to 128 tokens take as long as reading the weights."""
    kv = 2e-9 * shape.prefill_kv + 3e-8 * shape.decode_kv
    return 0.003 + 2.3e-5 * max(0, shape.tokens - 128) + 2e-5 * shape.requests + kv


def steady() -> float:
    return 1.0


def jitter(seed: int, sigma: float = 0.04, pauses: float = 0.003) -> Noise:
    """Noise with standard deviation `sigma` and occasional pauses (a garbage collection, another process)."""
    source = random.Random(seed)

    def one() -> float:
        pause = source.uniform(3, 10) if source.random() < pauses else 1.0
        return pause * math.exp(source.gauss(0, sigma))

    return one


@dataclass
class TimedRun:
    """The result of a run."""

    times: dict[str, list[float]] = field(default_factory=dict)  # token times by request id
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
        """Inter-token times of the requests whose ids start with `prefix`."""
        return [b - a for name, times in self.times.items() if name.startswith(prefix) for a, b in pairwise(times)]

    def busy_tokens_per_second(self) -> float:
        """Throughput of the steps with both prompts and decodes."""
        busy = [step for step in self.steps if step[0].prefill_tokens and step[0].decode_tokens]
        return sum(shape.tokens for shape, _ in busy) / sum(seconds for _, seconds in busy)

    def first_token(self, name: str) -> float:
        return self.times[name][0]


def timed_scheduler(
    cost: CostModel, budget: str | None = None, slots: int = 64, cap: int = 512, **options: float | None
) -> Scheduler:
    made = make_budget(budget, cost, max_batch_tokens=cap + slots, max_prefill_tokens=cap, **options)
    return Scheduler(KVCache(20_000, 16, prefix_caching=False), made, ContinuousPolicy(), slots)


def run_timed(
    scheduler: Scheduler,
    cost: CostModel,
    arrivals: Sequence[tuple[float, Request]],
    truth: Truth = cpu_like,
    noise: Noise = steady,
) -> TimedRun:
    """Serve requests that arrive at the given times, in order; the cost model observes every step."""
    result, now, pending = TimedRun(), 0.0, list(arrivals)
    while pending or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            time, request = pending.pop(0)
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
    """Requests that decode all the time, and long prompts that arrive meanwhile."""
    running = [(0.0, make_request(f"run{i}", 40, new=600)) for i in range(decodes)]
    return running + [(start + every * i, make_request(f"long{i}", 1500, new=2)) for i in range(long_prompts)]

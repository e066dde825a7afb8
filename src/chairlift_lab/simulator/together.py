"""Engines that compute each step together: a mixture whose experts are spread over them makes all wait for the slowest.

Such a step cannot begin before each engine has planned its own, so their schedulers run in one loop, step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle

from chairlift.core.cost_model import StepShape
from chairlift.core.plan import StepPlan, StepResult
from chairlift_lab.simulator.outcome import Arrival, RequestRecord, SimulationOutcome
from chairlift_lab.simulator.scheduler import SimulatedRequest, SimulatedScheduler, token_of


def simulate_together(
    arrivals: Iterable[Arrival],
    schedulers: Sequence[SimulatedScheduler],
    seconds: Callable[[Sequence[StepShape]], float],
) -> SimulationOutcome:
    """Run all of `arrivals`, which come to the engines in turn; `seconds` predicts a step from the shapes of all."""
    outcome, now = SimulationOutcome(), 0.0
    pending, turns = deque(arrivals), cycle(enumerate(schedulers))
    while pending or any(scheduler.has_work for scheduler in schedulers):
        while pending and pending[0].time <= now:
            outcome.records.append(_submit(pending.popleft(), *next(turns)))
        plans = [scheduler.schedule(now) for scheduler in schedulers]
        for scheduler in schedulers:
            scheduler.record_events()
        if not any(plans):
            now = _next_time(schedulers, pending, now)
            continue
        shapes = [StepShape.of(plan) if plan else StepShape() for plan in plans]
        duration = seconds(shapes)
        now += duration
        outcome.steps += 1
        outcome.busy_seconds += duration * len(schedulers)
        outcome.gaps.add(duration, sum(shape.decode_tokens for shape in shapes))
        for scheduler, plan in zip(schedulers, plans, strict=True):
            _end_step(scheduler, plan, now)
    outcome.seconds = max(record.end or 0.0 for record in outcome.records)
    outcome.replica_seconds = outcome.seconds * len(schedulers)
    outcome.preemptions = sum(scheduler.preemptions for scheduler in schedulers)
    return outcome


def _submit(arrival: Arrival, index: int, scheduler: SimulatedScheduler) -> RequestRecord:
    record = RequestRecord(
        arrival.time,
        len(arrival.prompt),
        arrival.n_out,
        index,
        tenant=arrival.tenant,
        service_class=arrival.service_class,
    )
    scheduler.enter(SimulatedRequest(record, arrival.prompt, scheduler.take_place()))
    return record


def _next_time(schedulers: Sequence[SimulatedScheduler], pending: Sequence[Arrival], now: float) -> float:
    """When something happens, with no engine computing: a request comes, or a batch is released."""
    times = [pending[0].time] if pending else []
    wakeups = (scheduler.next_wakeup(now) for scheduler in schedulers)
    times += [time for time in wakeups if time is not None and time > now]
    assert times, "requests wait, and nothing will happen"
    return min(times)


def _end_step(scheduler: SimulatedScheduler, plan: StepPlan, now: float) -> None:
    if plan:
        tokens = [token_of(chunk.request) for chunk in plan.chunks if chunk.samples]
        scheduler.apply(StepResult(plan, tokens, [None] * len(tokens)), now)
        scheduler.record_events()

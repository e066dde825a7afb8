"""A tenant who floods the lift, on a virtual clock: what the others feel of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import pytest

from chairlift.core.events import RequestFinished, RequestQueued, TokenProduced
from chairlift.core.integrity import check_quiescent
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from tests.core.driving import make_request, make_scheduler, run_plan

Arrival = tuple[float, Callable[[str, float], Request]]


def step_seconds(plan: StepPlan) -> float:
    """A fixed cost for reading the weights, and one for each token."""
    return 0.008 + 0.00005 * plan.num_tokens


def simulate(scheduler: Scheduler, arrivals: Iterable[Arrival]) -> dict[str, tuple[float, float]]:
    """Time to first token and time to the end of every request, by id."""
    coming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    ended: dict[str, float] = {}
    now, number = 0.0, 0
    while coming or scheduler.has_work:
        while coming and coming[0][0] <= now:
            time, make = coming.popleft()
            scheduler.submit(make(f"{number}", time), time)
            number += 1
        plan = scheduler.schedule(now)
        if not plan:
            now = max(now, coming[0][0])
            continue
        now += step_seconds(plan)
        scheduler.apply(run_plan(plan), now)
        for event in scheduler.drain_events():
            if isinstance(event, RequestQueued):
                came[event.request_id] = event.time
            elif isinstance(event, TokenProduced):
                first.setdefault(event.request_id, event.time - came[event.request_id])
            elif isinstance(event, RequestFinished):
                ended[event.request_id] = event.time - came[event.request_id]
    check_quiescent(scheduler)
    return {name: (first[name], ended[name]) for name in came}


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def ttft_of_the_light_tenant(flooded: bool, order: str, prompt: int, num_blocks: int = 4000) -> float:
    light, flood = [], []

    def make(tenant: str, prompt: int, new: int, names: list[str]) -> Callable[[str, float], Request]:
        def request(name: str, now: float) -> Request:
            names.append(name)
            return make_request(name, prompt, new, tenant=tenant, arrival=now)

        return request

    # A light tenant asks now and then, at times that fall anywhere within a step. The other one has sent 200 long
    # requests before, and sends more than the machine can serve.
    arrivals: list[Arrival] = [(1.0 + 0.8937 * i, make("light", prompt, 20, light)) for i in range(20)]
    if flooded:
        arrivals += [(0.0, make("flood", 300, 200, flood)) for _ in range(200)]
        arrivals += [(0.1 * i, make("flood", 300, 200, flood)) for i in range(190)]
    scheduler = make_scheduler(
        num_blocks,
        block_size=16,
        max_batch_tokens=144,
        max_prefill_tokens=128,
        max_batch_requests=16,
        order=order,
        prefix_caching=False,
    )
    times = simulate(scheduler, arrivals)
    assert len(light) == 20
    return p95([times[name][0] for name in light])


@pytest.mark.parametrize("prompt", [256, 600, 1500])
def test_a_flood_does_not_double_the_time_to_first_token_of_others(prompt: int) -> None:
    idle = ttft_of_the_light_tenant(False, "fair", prompt)
    assert ttft_of_the_light_tenant(True, "fair", prompt) <= 2 * idle


def test_nor_when_it_has_filled_the_memory() -> None:
    """320 blocks: ten of its sixteen seats' worth of tokens."""
    idle = ttft_of_the_light_tenant(False, "fair", 600, num_blocks=320)
    assert ttft_of_the_light_tenant(True, "fair", 600, num_blocks=320) <= 2 * idle


def test_without_fair_sharing_it_does() -> None:
    idle = ttft_of_the_light_tenant(False, "fcfs", 600)
    assert ttft_of_the_light_tenant(True, "fcfs", 600) > 20 * idle

"""A tenant who floods the lift, on a virtual clock: what the others feel of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

import pytest

from chairlift.core.budget import FixedBudget
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.courtesy import Courtesy
from chairlift.core.events import RequestQueued, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.kv_cache import KVCache
from chairlift.core.ordering import FairOrdering, make_ordering
from chairlift.core.plan import StepPlan
from chairlift.core.policy import make_policy
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.waiting import WaitReason
from chairlift.simulate.measured import MeasuredCost
from tests.core.driving import make_request, run_plan, step

Arrival = tuple[float, Callable[[str, float], Request]]


@dataclass(frozen=True)
class Machine:
    """What a step costs: a fixed part for reading the weights, and one for each token."""

    step: float
    token: float
    seats: int
    every: float = 0.8937  # seconds between two requests of the light tenant

    def seconds(self, plan: StepPlan) -> float:
        return self.step + self.token * plan.num_tokens


GPU_LIKE = Machine(0.008, 0.00005, 16)
CPU_LIKE = Machine(0.020, 0.0012, 64, every=3.917)


def simulate(
    scheduler: Scheduler, machine: Machine, cost: CostModel, arrivals: Iterable[Arrival], until: Callable[[], int]
) -> dict[str, float]:
    """Time to first token of every request that had one, by id. Ends when `until` returns 0."""
    coming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    now, number = 0.0, 0
    while coming or (scheduler.has_work and until()):
        while coming and coming[0][0] <= now:
            time, make = coming.popleft()
            scheduler.submit(make(f"{number}", time), time)
            number += 1
        plan = scheduler.schedule(now)
        if not plan:
            now = max(now, coming[0][0])
            continue
        seconds = machine.seconds(plan)
        now += seconds
        cost.observe(StepShape.of(plan), seconds)
        scheduler.apply(run_plan(plan), now)
        for event in scheduler.drain_events():
            if isinstance(event, RequestQueued):
                came[event.request_id] = event.time
            elif isinstance(event, TokenProduced):
                first.setdefault(event.request_id, event.time - came[event.request_id])
    check_accounting(scheduler)
    return first


def p95(values: list[float]) -> float:
    return sorted(values)[ceil(0.95 * len(values)) - 1]


def ttft_of_the_light_tenant(
    flooded: bool, order: str, prompt: int, num_blocks: int = 4000, machine: Machine = GPU_LIKE
) -> float:
    light: list[Request] = []

    def make(tenant: str, prompt: int, new: int) -> Callable[[str, float], Request]:
        def request(name: str, now: float) -> Request:
            made = make_request(name, prompt, new, tenant=tenant, arrival=now)
            if tenant == "light":
                light.append(made)
            return made

        return request

    # A light tenant asks now and then, at times that fall anywhere within a step. The other one has sent 200 long
    # requests before, and sends more than the machine can serve.
    arrivals: list[Arrival] = [(1.0 + machine.every * i, make("light", prompt, 20)) for i in range(20)]
    if flooded:
        arrivals += [(0.0, make("flood", 300, 200)) for _ in range(200)]
        arrivals += [(0.1 * i, make("flood", 300, 200)) for i in range(170)]
    ordering, cost = make_ordering(order), CostModel()
    scheduler = Scheduler(
        KVCache(num_blocks, 16, prefix_caching=False),
        FixedBudget(128 + machine.seats, 128),
        make_policy("continuous"),
        machine.seats,
        ordering=ordering,
        courtesy=Courtesy(ordering, cost, 128) if isinstance(ordering, FairOrdering) else None,
    )
    times = simulate(scheduler, machine, cost, arrivals, lambda: sum(not request.num_output for request in light))
    assert len(light) == 20
    return p95([times[request.id] for request in light])


@pytest.mark.parametrize(
    ("machine", "prompt"),
    [
        *((GPU_LIKE, prompt) for prompt in (16, 64, 128)),
        *((CPU_LIKE, prompt) for prompt in (16, 256)),
        *(pytest.param(GPU_LIKE, prompt, marks=pytest.mark.slow) for prompt in (32, 256, 512, 1024)),
        *(pytest.param(CPU_LIKE, prompt, marks=pytest.mark.slow) for prompt in (64, 128, 600)),
    ],
    ids=lambda value: value if isinstance(value, int) else "gpu" if value is GPU_LIKE else "cpu",
)
def test_a_flood_does_not_double_the_time_to_first_token_of_others(machine: Machine, prompt: int) -> None:
    idle = ttft_of_the_light_tenant(False, "fair", prompt, machine=machine)
    assert ttft_of_the_light_tenant(True, "fair", prompt, machine=machine) <= 2 * idle


def test_nor_when_it_has_filled_the_memory() -> None:
    """320 blocks: ten of its sixteen seats' worth of tokens."""
    idle = ttft_of_the_light_tenant(False, "fair", 600, num_blocks=320)
    assert ttft_of_the_light_tenant(True, "fair", 600, num_blocks=320) <= 2 * idle


def test_without_fair_sharing_it_does() -> None:
    idle = ttft_of_the_light_tenant(False, "fcfs", 600)
    assert ttft_of_the_light_tenant(True, "fcfs", 600) > 10 * idle


def courteous_scheduler() -> Scheduler:
    ordering, cost = FairOrdering(), MeasuredCost(0.02, 0.0, 0.0, 0.0, ((0, 0.0012),))
    return Scheduler(
        KVCache(400, 16),
        FixedBudget(128),
        make_policy("continuous"),
        32,
        ordering=ordering,
        courtesy=Courtesy(ordering, cost, 128),
    )


@pytest.mark.parametrize(
    ("guest_came", "tokens", "on_board", "reason"),
    [(990.0, 16, 12, WaitReason.COURTESY), (900.0, 128, 30, None)],
)
def test_a_crowd_is_held_back_only_while_there_are_guests(
    guest_came: float, tokens: int, on_board: int, reason: WaitReason | None
) -> None:
    """A guest's 16 tokens take 39.2 ms alone: as long as 16 tokens of a crowd, or 12 decodes and the least prompt."""
    scheduler = courteous_scheduler()
    scheduler.submit(make_request("guest", 16, 1, tenant="guest", arrival=guest_came), guest_came)
    step(scheduler, guest_came)
    for index in range(30):
        scheduler.submit(make_request(f"{index}", 20, 90, tenant="crowd", arrival=1000.0), 1000.0)
    assert step(scheduler, 1000.0).num_tokens == tokens
    for _ in range(60):
        step(scheduler, 1000.0)
    assert len(scheduler.running) == on_board
    assert scheduler.why_waiting("29") is reason


def test_a_crowd_sits_out_the_step_of_a_guest_but_never_two_in_a_row() -> None:
    scheduler = courteous_scheduler()
    for index in range(12):
        scheduler.submit(make_request(f"{index}", 4, 90, tenant="crowd"), 0.0)
    for _ in range(20):
        step(scheduler, 0.0)
    tenants = []
    for index in range(5):  # one guest after the other, so that each step computes someone's first token
        scheduler.submit(make_request(f"guest {index}", 8, 1, tenant=f"guest {index}", arrival=1.0), 1.0)
        plan = step(scheduler, 1.0)
        tenants.append({chunk.request.tenant for chunk in plan.chunks})
        check_accounting(scheduler)
    for index, found in enumerate(tenants):
        assert found == ({f"guest {index}"} if index % 2 == 0 else {f"guest {index}", "crowd"})
    while scheduler.has_work:
        step(scheduler, 2.0)
    check_quiescent(scheduler)

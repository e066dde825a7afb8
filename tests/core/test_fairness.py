"""Isolation of light tenants from a tenant that floods the engine, on a virtual clock."""

from __future__ import annotations

import pytest

from chairlift.core.budgets.base import FixedBudget
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.orderings.fair import FairOrdering
from chairlift.core.plan import BlockSwap, PlanBuilder
from chairlift.core.policies.base import make_policy
from chairlift.core.request import Status
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.state import SchedulerState
from chairlift.core.scheduler.tenant_isolation import TenantIsolation
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift_lab.simulator.step_cost import MeasuredCost
from tests.core.driving import make_request, step
from tests.core.flooding import CPU_LIKE, GPU_LIKE, LIGHT_REQUESTS, Machine, heavy_alone, serve

MOST, WORST = 2.0, 2.5  # limits on TTFT relative to an idle machine: 95th percentile and maximum
HEAVY_SHARE = 1 / 3  # the least share of its tokens per second that the heavy tenant keeps


@pytest.mark.parametrize(
    ("machine", "prompt"),
    [
        *((GPU_LIKE, prompt) for prompt in (16, 64, 128)),
        *((CPU_LIKE, prompt) for prompt in (16, 32)),
        *(pytest.param(GPU_LIKE, prompt, marks=pytest.mark.slow) for prompt in (32, 256, 600, 1024)),
        *(pytest.param(CPU_LIKE, prompt, marks=pytest.mark.slow) for prompt in (64, 128, 256, 600, 1024)),
    ],
    ids=lambda value: value if isinstance(value, int) else "gpu" if value is GPU_LIKE else "cpu",
)
def test_a_flood_does_not_double_the_time_to_first_token_of_others(machine: Machine, prompt: int) -> None:
    idle, flooded = serve(machine, prompt, flooded=False), serve(machine, prompt)
    assert len(idle.first_tokens) == len(flooded.first_tokens) == LIGHT_REQUESTS
    assert flooded.p95 <= MOST * idle.p95
    assert flooded.worst <= WORST * idle.p95, "the first light request, for which steps are not limited yet"
    assert flooded.heavy_rate >= HEAVY_SHARE * heavy_alone(machine)


@pytest.mark.parametrize(("machine", "arrival"), [(GPU_LIKE, 3.1), (CPU_LIKE, 40.1)], ids=["gpu", "cpu"])
def test_the_first_light_request_waits_for_at_most_one_full_step(machine: Machine, arrival: float) -> None:
    idle, full = (
        serve(machine, 16, flooded=False, light_requests=1),
        serve(machine, 16, light_requests=1, first_light=arrival),
    )
    assert full.worst <= idle.worst + machine.longest_step


def test_a_flood_that_fills_the_memory_does_not_double_it_either() -> None:
    """320 blocks are enough for ten of sixteen slots."""
    idle = serve(GPU_LIKE, 600, flooded=False, light_requests=20, blocks=320)
    assert serve(GPU_LIKE, 600, light_requests=20, blocks=320).worst <= MOST * idle.p95


def test_without_fair_sharing_a_flood_delays_first_tokens() -> None:
    idle = serve(GPU_LIKE, 600, flooded=False, light_requests=5)
    assert min(serve(GPU_LIKE, 600, light_requests=5, order="fcfs").first_tokens) > 10 * idle.p95


def isolating_scheduler() -> Scheduler:
    ordering, cost = FairOrdering(), MeasuredCost(0.02, 0.0, 0.0, 0.0, ((0, 0.0012),))
    return Scheduler(
        KVCache(400, 16),
        FixedBudget.of(128),
        make_policy("continuous"),
        32,
        ordering=ordering,
        tenant_isolation=TenantIsolation(ordering, cost.predict, 128),
    )


@pytest.mark.parametrize(
    ("light_arrival", "tokens", "running", "reason"),
    [(990.0, 16, 12, WaitReason.ISOLATION), (900.0, 128, 30, None)],
)
def test_a_heavy_tenant_is_limited_only_while_there_are_light_tenants(
    light_arrival: float, tokens: int, running: int, reason: WaitReason | None
) -> None:
    """The 16 light tokens take 39.2 ms alone: as long as 16 heavy tokens, or 12 decodes and the smallest chunk."""
    scheduler = isolating_scheduler()
    scheduler.submit(make_request("light", 16, 1, tenant="light", arrival=light_arrival), light_arrival)
    step(scheduler, light_arrival)
    for index in range(30):
        scheduler.submit(make_request(f"{index}", 20, 90, tenant="heavy", arrival=1000.0), 1000.0)
    assert step(scheduler, 1000.0).num_tokens == tokens
    for _ in range(60):
        step(scheduler, 1000.0)
    assert len(scheduler.running) == running
    assert scheduler.why_waiting("29") is reason


def decoding_heavy_tenant(size: int) -> tuple[Scheduler, float]:
    """A scheduler whose heavy tenant decodes in `size` slots, and the time after steps as long as predicted."""
    scheduler, now = isolating_scheduler(), 0.0
    for index in range(size):
        scheduler.submit(make_request(f"{index}", 4, 90, tenant="heavy"), 0.0)
    for _ in range(20):
        now += 0.02 + 0.0012 * step(scheduler, now).num_tokens
    return scheduler, now


def test_a_heavy_tenant_is_dropped_from_the_step_of_a_light_one_but_never_twice_in_a_row() -> None:
    scheduler, now = decoding_heavy_tenant(12)
    tenants = []
    for index in range(5):  # a new light tenant per step, so that each step computes a first token
        scheduler.submit(make_request(f"light {index}", 8, 1, tenant=f"light {index}", arrival=now), now)
        plan = step(scheduler, now)
        now += 0.02 + 0.0012 * plan.num_tokens
        tenants.append({chunk.request.tenant for chunk in plan.chunks})
        check_accounting(scheduler)
    for index, found in enumerate(tenants):
        assert found == ({f"light {index}"} if index % 2 == 0 else {f"light {index}", "heavy"})
    while scheduler.has_work:
        step(scheduler, now)
    check_quiescent(scheduler)


@pytest.mark.parametrize(("prompt", "dropped"), [(16, True), (24, False)])
def test_a_heavy_tenant_is_not_dropped_if_the_light_one_is_in_time(prompt: int, dropped: bool) -> None:
    """Twelve decodes take 34.4 ms, and 53.6 with 16 light tokens: together more than twice the 39.2 of the prompt
    alone. With 24 tokens it is 63.2, and twice 48.8."""
    scheduler, now = decoding_heavy_tenant(12)
    scheduler.submit(make_request("light", prompt, 5, tenant="light", arrival=now), now)
    plan = step(scheduler, now)
    assert ({chunk.request.tenant for chunk in plan.chunks} == {"light"}) == dropped


def test_a_light_tenant_that_was_served_more_is_not_isolated() -> None:
    scheduler, now = decoding_heavy_tenant(12)
    ordering = scheduler.ordering
    assert isinstance(ordering, FairOrdering)
    scheduler.submit(make_request("light", 16, 5, tenant="light", arrival=now), now)
    ordering._served["light"] = ordering.served("heavy") + 1
    assert {chunk.request.tenant for chunk in step(scheduler, now).chunks} == {"light", "heavy"}


def test_a_first_token_in_flight_does_not_drop_the_heavy_tenant_again() -> None:
    """On a GPU the next step is planned before the last one is read, here with a second request of the light tenant."""
    scheduler, now = decoding_heavy_tenant(12)
    scheduler.submit(make_request("light", 16, 5, tenant="light", arrival=now), now)
    first = scheduler.schedule(now)
    now += 1.0
    scheduler.submit(make_request("long", 400, 5, tenant="light", arrival=now), now)
    plans = [first, scheduler.schedule(now), scheduler.schedule(now + 1.0)]
    found = [{chunk.request.id for chunk in plan.chunks if not chunk.request.id.isdecimal()} for plan in plans]
    assert found == [{"light"}, {"light", "long"}, {"light", "long"}]
    with_heavy = [any(chunk.request.tenant == "heavy" for chunk in plan.chunks) for plan in plans]
    assert with_heavy == [False, True, True]


def test_a_heavy_request_that_is_swapped_in_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an abandoned step would not reset the request, though its blocks may not have been copied."""
    scheduler, now = decoding_heavy_tenant(12)
    returning, tenant_isolation = scheduler.get("0"), scheduler.tenant_isolation
    assert returning is not None
    assert tenant_isolation is not None
    drop_heavy_chunks = tenant_isolation.drop_heavy_chunks

    def with_swap_in(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        builder.swap_ins.append(BlockSwap(returning, block=0, slot=0))
        drop_heavy_chunks(state, builder, now)

    monkeypatch.setattr(tenant_isolation, "drop_heavy_chunks", with_swap_in)
    scheduler.submit(make_request("light", 16, 5, tenant="light", arrival=now), now)
    plan = scheduler.schedule(now)
    assert {chunk.request.id for chunk in plan.chunks} == {"0", "light"}
    scheduler.abandon(plan, now)
    check_accounting(scheduler)
    assert (returning.status, returning.num_computed) == (Status.WAITING, 0)

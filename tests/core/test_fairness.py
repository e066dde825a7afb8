"""A tenant that floods the engine, on a virtual clock: what it costs the others."""

from __future__ import annotations

import pytest

from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.orderings.fair import FairOrdering
from chairlift.core.plan import BlockSwap
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.policies.base import make_policy
from chairlift.core.request import Status
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.state import SchedulerState
from chairlift.core.scheduler.tenant_isolation import TenantIsolation
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.lab.simulator.measured import MeasuredCost
from tests.core.driving import make_request, step
from tests.core.flooding import CPU_LIKE, GPU_LIKE, GUESTS, Machine, crowd_alone, serve

MOST, WORST = 2.0, 2.5  # times what the first token takes on an idle machine: for 19 of 20 guests, and for all
CROWD_KEEPS = 1 / 3  # of its tokens per second


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
    assert len(idle.first_tokens) == len(flooded.first_tokens) == GUESTS
    assert flooded.p95 <= MOST * idle.p95
    assert flooded.worst <= WORST * idle.p95, "the first one, which is not expected"
    assert flooded.crowd_rate >= CROWD_KEEPS * crowd_alone(machine)


@pytest.mark.parametrize(("machine", "comes"), [(GPU_LIKE, 3.1), (CPU_LIKE, 40.1)], ids=["gpu", "cpu"])
def test_the_first_guest_of_a_full_lift_waits_for_one_step_at_most(machine: Machine, comes: float) -> None:
    idle, full = serve(machine, 16, flooded=False, guests=1), serve(machine, 16, guests=1, first_guest=comes)
    assert full.worst <= idle.worst + machine.longest_step


def test_nor_when_it_has_filled_the_memory() -> None:
    """320 blocks: ten of its sixteen slots' worth of tokens."""
    idle = serve(GPU_LIKE, 600, flooded=False, guests=20, blocks=320)
    assert serve(GPU_LIKE, 600, guests=20, blocks=320).worst <= MOST * idle.p95


def test_without_fair_sharing_it_does() -> None:
    idle = serve(GPU_LIKE, 600, flooded=False, guests=5)
    assert min(serve(GPU_LIKE, 600, guests=5, order="fcfs").first_tokens) > 10 * idle.p95


def courteous_scheduler() -> Scheduler:
    ordering, cost = FairOrdering(), MeasuredCost(0.02, 0.0, 0.0, 0.0, ((0, 0.0012),))
    return Scheduler(
        KVCache(400, 16),
        FixedBudget.of(128),
        make_policy("continuous"),
        32,
        ordering=ordering,
        tenant_isolation=TenantIsolation(ordering, cost, 128),
    )


@pytest.mark.parametrize(
    ("guest_came", "tokens", "running", "reason"),
    [(990.0, 16, 12, WaitReason.COURTESY), (900.0, 128, 30, None)],
)
def test_a_crowd_is_held_back_only_while_there_are_guests(
    guest_came: float, tokens: int, running: int, reason: WaitReason | None
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
    assert len(scheduler.running) == running
    assert scheduler.why_waiting("29") is reason


def decoding_crowd(size: int) -> tuple[Scheduler, float]:
    """And the time: steps take what they are expected to."""
    scheduler, now = courteous_scheduler(), 0.0
    for index in range(size):
        scheduler.submit(make_request(f"{index}", 4, 90, tenant="crowd"), 0.0)
    for _ in range(20):
        now += 0.02 + 0.0012 * step(scheduler, now).num_tokens
    return scheduler, now


def test_a_crowd_sits_out_the_step_of_a_guest_but_never_two_in_a_row() -> None:
    scheduler, now = decoding_crowd(12)
    tenants = []
    for index in range(5):  # one guest after the other, so that each step computes a first token
        scheduler.submit(make_request(f"guest {index}", 8, 1, tenant=f"guest {index}", arrival=now), now)
        plan = step(scheduler, now)
        now += 0.02 + 0.0012 * plan.num_tokens
        tenants.append({chunk.request.tenant for chunk in plan.chunks})
        check_accounting(scheduler)
    for index, found in enumerate(tenants):
        assert found == ({f"guest {index}"} if index % 2 == 0 else {f"guest {index}", "crowd"})
    while scheduler.has_work:
        step(scheduler, now)
    check_quiescent(scheduler)


@pytest.mark.parametrize(("prompt", "gives_way"), [(16, True), (24, False)])
def test_a_crowd_stays_if_the_guest_is_in_time_anyhow(prompt: int, gives_way: bool) -> None:
    """Twelve decodes take 34.4 ms, and with 16 tokens of a guest 53.6: more than twice the guest's 39.2. With 24 tokens
    it is 63.2, and twice 48.8."""
    scheduler, now = decoding_crowd(12)
    scheduler.submit(make_request("guest", prompt, 5, tenant="guest", arrival=now), now)
    plan = step(scheduler, now)
    assert ({chunk.request.tenant for chunk in plan.chunks} == {"guest"}) == gives_way


def test_a_guest_who_has_had_its_share_waits_its_turn() -> None:
    scheduler, now = decoding_crowd(12)
    ordering = scheduler.ordering
    assert isinstance(ordering, FairOrdering)
    scheduler.submit(make_request("guest", 16, 5, tenant="guest", arrival=now), now)
    ordering._served["guest"] = ordering.served("crowd") + 1
    assert {chunk.request.tenant for chunk in step(scheduler, now).chunks} == {"guest", "crowd"}


def test_a_first_token_that_is_computed_but_not_read_is_no_reason_to_sit_out() -> None:
    """On a GPU the next step is planned before the last one is read. A second guest of the same tenant is there."""
    scheduler, now = decoding_crowd(12)
    scheduler.submit(make_request("guest", 16, 5, tenant="guest", arrival=now), now)
    first = scheduler.schedule(now)
    now += 1.0
    scheduler.submit(make_request("long", 400, 5, tenant="guest", arrival=now), now)
    plans = [first, scheduler.schedule(now), scheduler.schedule(now + 1.0)]
    found = [{chunk.request.id for chunk in plan.chunks if not chunk.request.id.isdecimal()} for plan in plans]
    assert found == [{"guest"}, {"guest", "long"}, {"guest", "long"}]
    crowded = [any(chunk.request.tenant == "crowd" for chunk in plan.chunks) for plan in plans]
    assert crowded == [False, True, True]


def test_who_comes_back_from_the_host_in_the_step_of_a_guest_stays_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, were the step interrupted, it would not be noted that its blocks were perhaps not copied."""
    scheduler, now = decoding_crowd(12)
    returning, tenant_isolation = scheduler.get("0"), scheduler.tenant_isolation
    assert returning is not None
    assert tenant_isolation is not None
    give_way = tenant_isolation.give_way

    def with_a_return(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        builder.swap_ins.append(BlockSwap(returning, block=0, slot=0))
        give_way(state, builder, now)

    monkeypatch.setattr(tenant_isolation, "give_way", with_a_return)
    scheduler.submit(make_request("guest", 16, 5, tenant="guest", arrival=now), now)
    plan = scheduler.schedule(now)
    assert {chunk.request.id for chunk in plan.chunks} == {"0", "guest"}
    scheduler.abandon(plan, now)
    check_accounting(scheduler)
    assert (returning.status, returning.num_computed) == (Status.WAITING, 0)

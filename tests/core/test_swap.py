"""Preemption by swapping: the copies of plans, and that nothing is lost."""

from __future__ import annotations

import pytest

from chairlift.core.events import RequestAdmitted, RequestPreempted
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.kv.swap import SwapCost, SwapSpace, check_mode
from chairlift.core.plan import BlockSwap, StepPlan
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.errors import InvalidParameter
from tests.core.driving import events_of, make_request, make_scheduler, run_plan, shape, step
from tests.core.memory_model import MemoryModel


def run_until_swap_out(scheduler: Scheduler, memory: MemoryModel) -> StepPlan:
    while True:
        plan = scheduler.schedule(0.0)
        check_accounting(scheduler)
        memory.run(plan)
        scheduler.apply(run_plan(plan), 0.0)
        if plan.swap_outs:
            return plan


def run_to_end(scheduler: Scheduler, memory: MemoryModel) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        check_accounting(scheduler)
        memory.run(plan)
        scheduler.apply(run_plan(plan), 0.0)
        plans.append(plan)
        assert len(plans) < 1000
    check_quiescent(scheduler)
    return plans


def tight(num_slots: int = 10, **options: object) -> tuple[Scheduler, list[Request], MemoryModel]:
    """Two requests that together need more than six blocks of four."""
    options.setdefault("prefix_caching", False)
    scheduler = make_scheduler(num_blocks=6, block_size=4, swap=SwapSpace(num_slots), **options)
    requests = [make_request(name, 6, new=10) for name in "ab"]
    for request in requests:
        scheduler.submit(request, 0.0)
    return scheduler, requests, MemoryModel(4)


def test_a_swapped_request_continues_without_recomputing() -> None:
    scheduler, (a, b), memory = tight()
    before = list(b.tokens)
    plan = run_until_swap_out(scheduler, memory)
    assert shape(plan) == [("a", 12, 1)]
    assert b.status is Status.WAITING
    assert b.num_computed == 12
    table = {swap.block for swap in plan.swap_outs}
    assert plan.swap_outs == tuple(BlockSwap(b, swap.block, swap.slot) for swap in plan.swap_outs)
    assert len(table) == len({swap.slot for swap in plan.swap_outs}) == 3
    assert list(b.tokens[: len(before)]) == before
    assert scheduler.swap.num_free == 7
    (preempted,) = events_of(scheduler, RequestPreempted)
    assert preempted.swapped
    plans = run_to_end(scheduler, memory)
    (swap_in_plan,) = [plan for plan in plans if plan.swap_ins]
    assert [swap.slot for swap in swap_in_plan.swap_ins] == [swap.slot for swap in plan.swap_outs]
    assert shape(swap_in_plan) == [("b", 12, 1)]  # no token is computed twice
    (admitted,) = events_of(scheduler, RequestAdmitted)
    assert (admitted.cached_tokens, admitted.swapped_tokens) == (0, 12)
    assert a.num_output == b.num_output == 10


def test_a_request_recomputes_if_host_slots_are_short() -> None:
    scheduler, (_, b), memory = tight(num_slots=2)
    plans = run_to_end(scheduler, memory)
    assert not any(plan.swap_outs or plan.swap_ins for plan in plans)
    assert [event.swapped for event in events_of(scheduler, RequestPreempted)] == [False]
    assert b.num_output == 10


def test_blocks_still_in_the_prefix_cache_are_not_swapped_in() -> None:
    """A swapped block stays in the index until it is evicted, and is shared if it is still there."""
    scheduler, _, memory = tight(prefix_caching=True)
    plan = run_until_swap_out(scheduler, memory)
    assert len(plan.swap_outs) == 3  # all of them, since any may be evicted
    plans = run_to_end(scheduler, memory)
    (swap_in_plan,) = [plan for plan in plans if plan.swap_ins or [name for name, _, _ in shape(plan)] == ["b"]][:1]
    assert len(swap_in_plan.swap_ins) < 3
    (admitted,) = events_of(scheduler, RequestAdmitted)[-1:]
    assert admitted.cached_tokens + admitted.swapped_tokens >= 12


def test_a_swapped_in_block_can_be_shared() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, swap=SwapSpace(10))
    memory = MemoryModel(4)
    scheduler.submit(make_request("a", 6, new=10), 0.0)
    scheduler.submit(make_request("b", range(6), new=10), 0.0)
    run_until_swap_out(scheduler, memory)
    run_to_end(scheduler, memory)
    scheduler.submit(make_request("c", range(9), new=1), 0.0)
    run_to_end(scheduler, memory)
    admitted = {event.request_id: event.cached_tokens for event in events_of(scheduler, RequestAdmitted)}
    assert admitted["c"] == 4


def test_a_request_cancelled_while_swapped_frees_its_host_slots() -> None:
    scheduler, _, memory = tight()
    run_until_swap_out(scheduler, memory)
    scheduler.finish("b", Ending(FinishReason.CANCELLED), 0.0)
    check_accounting(scheduler)
    assert scheduler.swap.num_free == 10
    run_to_end(scheduler, memory)


def test_a_slot_read_by_a_step_is_not_written_by_the_same_step() -> None:
    swap = SwapSpace(3)
    scheduler, (_, b), memory = tight()
    run_until_swap_out(scheduler, memory)
    swap._free, swap._slots = [], {"b": {(0, 0): 0, (0, 1): 1, (0, 2): 2}}
    assert [pair.slot for pair in swap.swap_in(b, {(0, 1): 7, (0, 2): 8})] == [1, 2]
    other = make_request("c", 4)
    other.start_from(4)
    scheduler.kv.attach(other, scheduler.kv.match(other))
    scheduler.kv.reserve(other, 4)
    other.start_from(4)
    assert swap.swap_out(other, scheduler.kv) is None
    swap.begin_step()
    assert swap.swap_out(other, scheduler.kv) is not None


def test_an_abandoned_step_has_swapped_nothing() -> None:
    scheduler, (_, b), memory = tight()
    while True:
        plan = scheduler.schedule(0.0)
        if plan.swap_outs:
            break
        memory.run(plan)
        scheduler.apply(run_plan(plan), 0.0)
    scheduler.abandon(plan, 0.0)
    check_accounting(scheduler)
    assert b.num_computed == 0
    assert scheduler.swap.num_free == 10
    run_to_end(scheduler, memory)
    assert b.num_output == 10


def test_siblings_are_swapped_like_other_requests() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, swap=SwapSpace(20), prefix_caching=False)
    memory = MemoryModel(4)
    leader = make_request("a", range(6), new=12)
    siblings = [make_request(f"a{i}", range(6), new=12, leader=leader) for i in (1, 2)]
    for request in (leader, *siblings):
        scheduler.submit(request, 0.0)
    run_to_end(scheduler, memory)
    assert all(request.num_output == 12 for request in (leader, *siblings))


class CostPerToken:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def recompute_seconds(self, tokens: int) -> float:
        return self.seconds * tokens


@pytest.mark.parametrize(("seconds_per_token", "swaps"), [(0.5, False), (0.51, True)])
def test_auto_chooses_the_cheaper_mode(seconds_per_token: float, swaps: bool) -> None:
    """Swapping 3 blocks of 100 bytes out and in at 100 bytes/s takes 6 seconds; recomputing takes 12 tokens."""
    cost = SwapCost(100, 100.0, CostPerToken(seconds_per_token).recompute_seconds)
    scheduler = make_scheduler(num_blocks=6, block_size=4, swap=SwapSpace(10, cost), prefix_caching=False)
    for name in "ab":
        scheduler.submit(make_request(name, 6, new=10), 0.0)
    run_to_end(scheduler, MemoryModel(4))
    assert [event.swapped for event in events_of(scheduler, RequestPreempted)] == [swaps]


def test_modes_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="recompute, swap, auto"):
        check_mode("unknown", None)
    with pytest.raises(InvalidParameter, match="swap_memory"):
        check_mode("recompute", "1GiB")
    check_mode("auto", "1GiB")


def test_a_plan_without_preemption_has_no_swaps() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 3), 0.0)
    plan = step(scheduler)
    assert plan.swap_outs == plan.swap_ins == ()

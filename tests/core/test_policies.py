"""Static and dynamic batching: when batches start, what finished rows keep, and that no request waits forever."""

from __future__ import annotations

import pytest

from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.policies.base import make_policy
from chairlift.core.request import Ending, FinishReason
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.errors import InvalidParameter
from tests.core.driving import deterministic_token, make_request, make_scheduler, run_pipelined, run_to_end, shape, step

BATCHING = ("static", "dynamic")


def submit(scheduler: Scheduler, name: str, prompt: int = 3, new: int = 4, now: float = 0.0, **options: object) -> None:
    scheduler.submit(make_request(name, prompt, new, arrival=now, **options), now)


def running_ids(scheduler: Scheduler) -> list[str]:
    return [request.id for request in scheduler.running]


@pytest.mark.parametrize("policy", BATCHING)
def test_a_full_batch_starts_at_once_and_no_request_joins_it(policy: str) -> None:
    scheduler = make_scheduler(max_batch_requests=2, policy=policy)
    submit(scheduler, "a", new=2)
    submit(scheduler, "b", new=4)
    assert shape(step(scheduler)) == [("a", 0, 3), ("b", 0, 3)]
    submit(scheduler, "c")
    submit(scheduler, "d")
    plans = [step(scheduler) for _ in range(3)]
    # a is done after its second token; its row is computed until b is done too.
    assert [shape(plan) for plan in plans] == [[("a", 3, 1), ("b", 3, 1)], [("b", 4, 1)], [("b", 5, 1)]]
    assert [plan.idle_rows for plan in plans] == [0, 1, 1]
    assert scheduler.why_waiting("c") is WaitReason.BATCH_RUNNING
    plan = step(scheduler)
    assert shape(plan) == [("c", 0, 3), ("d", 0, 3)]
    assert plan.idle_rows == 0


def test_continuous_reuses_a_slot_in_the_next_step() -> None:
    scheduler = make_scheduler(max_batch_requests=2)
    for name, new in (("a", 2), ("b", 4), ("c", 4)):
        submit(scheduler, name, new=new)
    plans = [step(scheduler) for _ in range(3)]
    assert shape(plans[2]) == [("b", 4, 1), ("c", 0, 3)]
    assert all(plan.idle_rows == 0 for plan in plans)


@pytest.mark.parametrize("policy", BATCHING)
def test_an_incomplete_batch_starts_when_the_oldest_has_waited_long_enough(policy: str) -> None:
    scheduler = make_scheduler(max_batch_requests=4, policy=policy, max_delay=3.0)
    submit(scheduler, "a", now=1.0)
    assert not step(scheduler, 1.0)
    assert scheduler.why_waiting("a") is WaitReason.BATCH_FILLING
    submit(scheduler, "b", now=2.0)
    assert scheduler.next_wakeup(2.0) == 4.0
    assert not step(scheduler, 3.9)
    assert shape(step(scheduler, 4.0)) == [("a", 0, 3), ("b", 0, 3)]


@pytest.mark.parametrize("policy", BATCHING)
def test_an_incomplete_batch_starts_when_no_more_requests_are_expected(policy: str) -> None:
    scheduler = make_scheduler(max_batch_requests=4, policy=policy)
    submit(scheduler, "a")
    assert not step(scheduler)
    scheduler.expect_no_more()
    assert scheduler.next_wakeup(0.0) == 0.0
    assert shape(step(scheduler)) == [("a", 0, 3)]
    run_to_end(scheduler)
    submit(scheduler, "b")  # expect_no_more applied to earlier requests only
    assert not step(scheduler)


def test_the_two_policies_have_different_delays() -> None:
    wakeups = []
    for policy in BATCHING:
        scheduler = make_scheduler(policy=policy)
        submit(scheduler, "a")
        wakeups.append(scheduler.next_wakeup(0.0))
    assert wakeups == [10.0, 0.05]


def test_next_wakeup_considers_work_delays_and_deadlines() -> None:
    scheduler = make_scheduler(policy="dynamic", max_delay=5.0, max_batch_requests=2)
    assert scheduler.next_wakeup(0.0) is None
    submit(scheduler, "a", deadline=3.0)
    assert scheduler.next_wakeup(0.0) == 3.0
    step(scheduler, 3.0)
    assert scheduler.next_wakeup(3.0) is None
    submit(scheduler, "b", now=3.0)
    submit(scheduler, "c", now=3.0)
    assert scheduler.next_wakeup(3.5) == 3.5
    step(scheduler, 3.5)
    assert scheduler.next_wakeup(4.0) == 4.0
    continuous = make_scheduler()
    submit(continuous, "a")
    assert continuous.next_wakeup(7.0) == 7.0


@pytest.mark.parametrize("policy", BATCHING)
def test_finished_rows_hold_their_blocks_until_the_batch_is_over(policy: str) -> None:
    scheduler = make_scheduler(block_size=4, max_batch_requests=2, policy=policy)
    submit(scheduler, "a", prompt=8, new=1)
    submit(scheduler, "b", prompt=8, new=3)
    step(scheduler)
    assert running_ids(scheduler) == ["b"]
    assert scheduler.kv.pool.num_used == 4
    step(scheduler)
    assert scheduler.kv.pool.num_used == 5
    step(scheduler)
    check_quiescent(scheduler)


@pytest.mark.parametrize("policy", BATCHING)
def test_blocks_of_finished_rows_are_released_before_a_request_is_preempted(policy: str) -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, max_batch_requests=2, policy=policy, prefix_caching=False)
    submit(scheduler, "a", prompt=8, new=1)
    submit(scheduler, "b", prompt=4, new=16)
    idle = [step(scheduler, float(now)).idle_rows for now in range(16)]
    assert idle == [0] + [1] * 15  # the row stays without its memory
    check_quiescent(scheduler)


@pytest.mark.parametrize("policy", BATCHING)
def test_the_budget_may_spread_the_admission_of_a_batch_over_steps(policy: str) -> None:
    scheduler = make_scheduler(max_batch_requests=3, max_batch_tokens=4, policy=policy)
    for name in "abcd":
        submit(scheduler, name, prompt=4, new=1)
    # Each finishes with its first token; the rest of the batch follows without waiting for a full batch again.
    assert [shape(step(scheduler)) for _ in range(3)] == [[("a", 0, 4)], [("b", 0, 4)], [("c", 0, 4)]]


@pytest.mark.parametrize("policy", BATCHING)
def test_siblings_of_a_request_outside_the_batch_do_not_deadlock(policy: str) -> None:
    """The leader is preempted, or not in the batch at all: its siblings in the batch must not wait for it."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_batch_requests=4, policy=policy, order="shortest")
    leader = make_request("a", range(16), new=5)
    for request in (leader, *(make_request(f"a{i}", range(16), new=5, leader=leader) for i in range(3))):
        scheduler.submit(request, 0.0)
    for index in range(3):
        submit(scheduler, f"small{index}", prompt=2, new=2)
    run_to_end(scheduler, limit=200)
    check_quiescent(scheduler)


@pytest.mark.parametrize("policy", BATCHING)
def test_cancelling_the_last_request_of_a_batch_frees_its_slots(policy: str) -> None:
    scheduler = make_scheduler(max_batch_requests=2, policy=policy)
    submit(scheduler, "a", new=1)
    submit(scheduler, "b", new=50)
    submit(scheduler, "c")
    submit(scheduler, "d")
    step(scheduler)
    step(scheduler)
    scheduler.finish("b", Ending(FinishReason.CANCELLED), 1.0)
    check_accounting(scheduler)
    assert scheduler.kv.pool.num_used == 0
    assert shape(step(scheduler)) == [("c", 0, 3), ("d", 0, 3)]


@pytest.mark.parametrize("policy", BATCHING)
@pytest.mark.parametrize("depth", [1, 2])
def test_batches_can_be_planned_ahead(policy: str, depth: int) -> None:
    outputs = []
    for pipelined in (False, True):
        scheduler = make_scheduler(num_blocks=20, max_batch_requests=3, policy=policy)
        requests = [make_request(f"r{i}", 3 + i % 4, new=1 + i % 5) for i in range(10)]
        for request in requests:
            scheduler.submit(request, 0.0)
        if pipelined:
            run_pipelined(scheduler, depth)
        else:
            run_to_end(scheduler)
        check_quiescent(scheduler)
        outputs.append([list(request.output) for request in requests])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("policy", BATCHING)
def test_an_abandoned_batch_starts_again(policy: str) -> None:
    scheduler = make_scheduler(max_batch_requests=2, policy=policy)
    submit(scheduler, "a", new=1)
    submit(scheduler, "b", new=5)
    step(scheduler)
    plan = scheduler.schedule(1.0)
    scheduler.abandon(plan, 1.0)
    check_accounting(scheduler)
    assert not scheduler.idle
    run_to_end(scheduler)
    check_quiescent(scheduler)


def test_batches_of_uneven_lengths_waste_rows() -> None:
    shares = {}
    for policy in ("static", "dynamic", "continuous"):
        scheduler = make_scheduler(max_batch_requests=4, policy=policy)
        for index in range(16):
            submit(scheduler, f"r{index}", new=1 + 7 * (index % 4))
        scheduler.expect_no_more()
        plans = run_to_end(scheduler, deterministic_token)
        useful = sum(len(plan.chunks) for plan in plans)
        shares[policy] = useful / (useful + sum(plan.idle_rows for plan in plans))
    # 1, 8, 15 and 22 tokens in rows of 22 steps.
    assert shares["static"] == shares["dynamic"] == (1 + 8 + 15 + 22) / (4 * 22)
    assert shares["continuous"] == 1.0


def test_names_and_parameters_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="continuous, dynamic, static"):
        make_policy("statik")
    with pytest.raises(InvalidParameter, match="max_delay_ms: only goes with policy dynamic or static"):
        make_policy("continuous", 5.0)
    for delay in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidParameter, match="max_delay_ms"):
            make_policy("dynamic", delay)


def test_a_batch_has_the_leader_of_its_completions() -> None:
    """The leader has lost its place and is due later than the completions that wait for its prompt."""
    scheduler = make_scheduler(max_batch_requests=1, policy="static", order="priority")
    leader = make_request("n", 6)
    sibling = make_request("n#1", list(leader.prompt), leader=leader)
    leader.priority = 1
    for request in (leader, sibling):
        scheduler.submit(request, 0.0)
    scheduler.expect_no_more()
    for number in range(20):
        step(scheduler, float(number))
    assert not scheduler.has_work

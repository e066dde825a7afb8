"""The counts of wait reasons, which the metrics report."""

from __future__ import annotations

from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.core.targets import Targets
from tests.core.driving import make_request, make_scheduler, settled_forecast, step


def test_waiting_for_a_slot_and_waiting_for_another_request_are_different_reasons() -> None:
    scheduler = make_scheduler(block_size=4, max_batch_tokens=4, max_batch_requests=3)
    scheduler.submit(make_request("a", range(20)), 0)
    scheduler.submit(make_request("same", range(20)), 0)
    leader = make_request("n", range(100, 108))
    for request in (leader, make_request("n#1", range(100, 108), leader=leader)):
        scheduler.submit(request, 0)
    assert scheduler.waiting.reasons() == {WaitReason.NEXT_STEP: 4}
    step(scheduler)
    counts = scheduler.waiting.reasons()
    assert counts.total() == len(scheduler.waiting) == 3
    assert counts[WaitReason.BUDGET] == 3  # the first prompt took the whole step
    step(scheduler)
    for name in ("b", "c", "d"):
        scheduler.submit(make_request(name, 9), 1)
    assert scheduler.waiting.reasons()[WaitReason.NEXT_STEP] == 3


def test_requests_wait_for_prefixes_and_siblings_being_computed() -> None:
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_batch_tokens=64)
    scheduler.submit(make_request("a", range(100)), 0)
    step(scheduler)
    scheduler.submit(make_request("same", range(100)), 0)
    leader = make_request("n", range(200, 208))
    for request in (leader, make_request("n#1", range(200, 208), leader=leader)):
        scheduler.submit(request, 0)
    step(scheduler)
    assert scheduler.waiting.reasons() == {WaitReason.PREFIX: 1, WaitReason.SIBLING: 1}
    assert scheduler.why_waiting("same") is WaitReason.NEXT_STEP  # it is computed by now


def test_requests_wait_for_slots() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    for name in "abc":
        scheduler.submit(make_request(name, 3), 0)
    step(scheduler)
    assert scheduler.waiting.reasons() == {WaitReason.SLOTS: 2}


def test_a_request_that_can_no_longer_be_in_time_waits_for_those_that_can() -> None:
    scheduler = make_scheduler(max_batch_requests=1, max_batch_tokens=16, order="slack", forecast=settled_forecast())
    scheduler.submit(make_request("running", 4, 50, targets=Targets(ttft=1.0)), 0.0)
    step(scheduler)
    for name, prompt, ttft in (("late", 90, 0.5), ("soon", 8, 20.0)):
        scheduler.submit(make_request(name, prompt, 1, targets=Targets(ttft=ttft)), 0.0)
    scheduler.submit(make_request("none", 8, 1), 0.0)
    step(scheduler)
    reasons = {name: scheduler.why_waiting(name) for name in ("late", "soon", "none")}
    assert reasons == {"late": WaitReason.LATE, "soon": WaitReason.SLOTS, "none": WaitReason.SLOTS}
    assert scheduler.waiting.reasons() == {WaitReason.LATE: 1, WaitReason.SLOTS: 2}

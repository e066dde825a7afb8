"""Targets of requests: what may be asked for, the orderings `edf` and `slack`, and the budget `slack`."""

from __future__ import annotations

import pytest

from chairlift.core.budgets.base import make_budget
from chairlift.core.cost_model import CostModel
from chairlift.core.events import RequestAdmitted
from chairlift.core.integrity import check_quiescent
from chairlift.core.plan import LimitReason
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.targets import Targets, parse_classes
from chairlift.errors import InvalidParameter
from tests.core.driving import events_of, make_request, make_scheduler, run_plan, settled_forecast, step

TARGETS = {
    "late": Targets(ttft=1.0),  # its prompt of 20 tokens takes 2 seconds
    "none": Targets(),
    "patient": Targets(e2e=60.0),
    "long": Targets(ttft=9.0),
    "soon": Targets(ttft=8.0),
}
PROMPTS = {"late": 20, "none": 5, "patient": 5, "long": 40, "soon": 10}


def admission_order(scheduler: Scheduler) -> list[str]:
    for name, targets in TARGETS.items():
        scheduler.submit(make_request(name, PROMPTS[name], 1, targets=targets), 0.0)
    while scheduler.has_work:
        step(scheduler, 0.0)
    check_quiescent(scheduler)
    return [event.request_id for event in events_of(scheduler, RequestAdmitted)]


def test_edf_admits_the_request_that_is_due_first() -> None:
    order = admission_order(make_scheduler(max_batch_requests=1, order="edf"))
    assert order == ["late", "soon", "long", "patient", "none"]


def test_slack_subtracts_the_work_and_leaves_hopeless_requests_to_the_end() -> None:
    # The step that computes a token costs 0.1 s and 0.4 / 16 s more; "long" must begin 4 s before it is due.
    scheduler = make_scheduler(max_batch_requests=1, max_batch_tokens=16, order="slack", forecast=settled_forecast())
    assert admission_order(scheduler) == ["long", "soon", "patient", "late", "none"]


def test_of_two_that_cannot_both_be_in_time_the_longer_one_gives_way() -> None:
    scheduler = make_scheduler(max_batch_requests=1, max_batch_tokens=16, order="slack", forecast=settled_forecast())
    for name, prompt, ttft in (("long", 40, 5.5), ("short", 12, 6.0)):
        scheduler.submit(make_request(name, prompt, 1, targets=Targets(ttft=ttft)), 0.0)
    step(scheduler, 0.0)
    assert [request.id for request in scheduler.running] == [] or scheduler.running[0].id == "short"
    assert scheduler.waiting[0].id == "long"


def test_a_cached_prompt_is_not_taken_for_hopeless() -> None:
    scheduler = make_scheduler(max_batch_requests=1, max_batch_tokens=64, order="slack", forecast=settled_forecast())
    prompt = list(range(60))
    scheduler.submit(make_request("first", prompt, 1), 0.0)
    step(scheduler, 0.0)
    scheduler.submit(make_request("patient", 10, 1, targets=Targets(ttft=30.0)), 0.0)
    scheduler.submit(make_request("cached", [*prompt, 99], 1, targets=Targets(ttft=2.0)), 0.0)
    step(scheduler, 0.0)
    assert scheduler.get("cached") is None  # it ended in this step
    assert scheduler.get("patient") is not None


def test_a_prompt_that_has_begun_is_not_interrupted_by_one_of_the_same_kind() -> None:
    scheduler = make_scheduler(max_batch_tokens=16, order="slack", forecast=settled_forecast())
    for name in "ab":
        scheduler.submit(make_request(name, 64, 1, targets=Targets(ttft=60.0)), 0.0)
    ends = []
    for number in range(20):
        plan = scheduler.schedule(float(number))
        scheduler.apply(run_plan(plan), float(number))
        ends += [name for name in "ab" if scheduler.get(name) is None and name not in ends]
        if ends == ["a"]:
            assert number < 5  # 64 tokens in steps of 16, with little left over for the other
            return
    raise AssertionError("both were computed in turn")


# ---- the budget -----------------------------------------------------------------------------------------------------


def settled_cost() -> CostModel:
    cost = settled_forecast().cost
    cost.largest_prefill = 1000
    for _ in range(50):
        cost._lateness.append(1.0)
    return cost


def chunk_beside(targets: Targets, now: float) -> tuple[int, LimitReason]:
    """The prompt tokens beside one decode whose first token came at time 10."""
    scheduler = make_scheduler(max_batch_tokens=512, max_batch_requests=4)
    scheduler.budget = make_budget("slack", settled_cost(), max_batch_tokens=512)
    scheduler.submit(make_request("decodes", 4, 50, targets=targets), 10.0)
    step(scheduler, 10.0)
    scheduler.submit(make_request("prompt", 300, 1), 10.0)
    scheduler.schedule(now)
    assert scheduler.limits is not None
    return scheduler.limits.prefill_tokens, scheduler.limits.reason


def test_prompts_get_the_time_that_running_requests_can_spare() -> None:
    # A step costs 0.4 s and 0.1 s for each token, so one with a decode and n prompt tokens takes 0.5 + n / 10.
    assert chunk_beside(Targets(tpot=1.5), 10.0) == (10, LimitReason.SLACK)
    assert chunk_beside(Targets(tpot=2.5), 10.0) == (20, LimitReason.SLACK)
    assert chunk_beside(Targets(tpot=2.5), 11.0) == (10, LimitReason.SLACK)


def test_a_late_request_gains_half_of_what_it_could() -> None:
    chunk, reason = chunk_beside(Targets(tpot=2.5), 20.0)
    assert (chunk, reason) == (10, LimitReason.SLACK)  # halfway between 0.5 and 2.5 seconds


def test_requests_without_targets_or_hope_limit_nothing() -> None:
    free = chunk_beside(Targets(), 10.0)
    assert free[1] is LimitReason.KNEE
    assert chunk_beside(Targets(tpot=0.2), 20.0) == free
    assert chunk_beside(Targets(e2e=1.0), 20.0) == free


# ---- what may be asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "word"),
    [({}, "must have"), ({"ttft": 5}, "not 'ttft'"), ({"tpot_ms": 0}, "tpot_ms"), ({"e2e_ms": "5"}, "e2e_ms")],
)
def test_bad_targets_are_refused(given: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidParameter, match=word):
        Targets.of_milliseconds(given)


def test_classes_are_parsed_and_bad_ones_refused() -> None:
    classes = parse_classes(["chat=ttft:500,tpot:50", "batch=e2e:60000,share:2"])
    assert classes["chat"].targets == Targets(ttft=0.5, tpot=0.05)
    assert (classes["batch"].targets, classes["batch"].share) == (Targets(e2e=60.0), 2.0)
    for text in ("chat", "chat=", "chat=ttft:x", "chat=speed:5", "chat=ttft:5,ttft:6", "a b=ttft:5", "c=share:1"):
        with pytest.raises(InvalidParameter, match="classes"):
            parse_classes([text])

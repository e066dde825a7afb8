"""Budgets limit the tokens and slots of steps, and changed limits are published."""

from __future__ import annotations

from chairlift.core.budgets.base import BatchLoad
from chairlift.core.events import BudgetDecided
from chairlift.core.plan import StepLimits
from chairlift.core.scheduler.scheduler import WaitReason
from tests.core.driving import events_of, make_request, make_scheduler, shape, step


class ScriptedBudget:
    """Returns given limits in turn and records the load of each call."""

    def __init__(self, *limits: StepLimits) -> None:
        self.script = list(limits)
        self.seen: list[tuple[float, list[str], list[str], list[str]]] = []

    def limits(self, load: BatchLoad) -> StepLimits:
        decoding, prefilling, waiting = (
            [request.id for request in group] for group in (load.decoding, load.prefilling, load.waiting)
        )
        self.seen.append((load.now, decoding, prefilling, waiting))
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def test_a_budget_may_limit_slots_and_the_queue_has_the_reason() -> None:
    scheduler = make_scheduler()
    scheduler.budget = ScriptedBudget(StepLimits(64, 64, slots=1), StepLimits(64, 64, slots=2))
    for name in ("a", "b", "c"):
        scheduler.submit(make_request(name, 3), 0)
    assert shape(step(scheduler)) == [("a", 0, 3)]
    assert scheduler.why_waiting("b") is WaitReason.TARGET
    assert shape(step(scheduler)) == [("a", 3, 1), ("b", 0, 3)]
    assert scheduler.why_waiting("c") is WaitReason.TARGET


def test_running_requests_stay_when_slots_become_fewer() -> None:
    scheduler = make_scheduler()
    scheduler.budget = ScriptedBudget(StepLimits(64, 64), StepLimits(64, 64, slots=1))
    for name in ("a", "b"):
        scheduler.submit(make_request(name, 3), 0)
    step(scheduler)
    assert shape(step(scheduler)) == [("a", 3, 1), ("b", 3, 1)]


def test_a_decision_is_published_when_it_changes() -> None:
    scheduler = make_scheduler()
    first, second = StepLimits(64, 8), StepLimits(64, 16, predicted_seconds=0.5)
    scheduler.budget = ScriptedBudget(first, StepLimits(64, 8, predicted_seconds=0.1), second)
    scheduler.submit(make_request("a", 30), 0)
    published = []
    for now in range(4):
        step(scheduler, now)
        published += events_of(scheduler, BudgetDecided)
    assert published == [BudgetDecided(0, first), BudgetDecided(2, second)]


def test_a_budget_gets_the_decoding_prefilling_and_waiting_requests() -> None:
    scheduler = make_scheduler(max_batch_tokens=10, max_batch_requests=2)
    budget = scheduler.budget = ScriptedBudget(StepLimits(10, 10))
    scheduler.submit(make_request("a", 4), 0)
    step(scheduler)
    scheduler.submit(make_request("long", 20), 0)
    step(scheduler)
    scheduler.submit(make_request("b", 5), 0)
    step(scheduler, 2.0)
    assert budget.seen == [(0, [], [], ["a"]), (0, ["a"], [], ["long"]), (2.0, ["a"], ["long"], ["b"])]

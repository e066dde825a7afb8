"""Predictions for several steps agree with the sum over single steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.cost_model import FEATURES, CostModel, StepShape, WorkForecast, chunk_kv
from chairlift.core.request import Ending, FinishReason
from chairlift.core.scheduler.scheduler import CANNOT_MEET_DEADLINE
from tests.core.driving import make_request
from tests.core.timed import cpu_like, jitter, run_timed, timed_scheduler

FORMULA = dict(zip(FEATURES, (0.002, 0.001, 0.0005, 1e-6, 9e-6, 0.0005, 0.03), strict=True))


def seconds_by_steps(cost: CostModel, tokens: int, start: int, chunk: int, beside: StepShape) -> float:
    """Recompute cost as a sum over steps."""
    seconds = 0.0
    for at in range(0, tokens, chunk):
        count = min(chunk, tokens - at)
        shape = StepShape(
            beside.decode_tokens,
            beside.prefill_tokens + count,
            beside.decode_kv,
            beside.prefill_kv + chunk_kv(start + at, count),
            beside.requests + 1,
        )
        seconds += cost.predict(shape) - cost.predict(beside)
    return seconds


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 600), st.integers(0, 64))
def test_recomputing_costs_what_it_adds_to_the_steps(tokens: int, start: int, chunk: int, decodes: int) -> None:
    cost = CostModel(FORMULA)
    beside = StepShape(decodes, 0, 100 * decodes, 0, decodes)
    found = WorkForecast(cost, chunk).recompute_seconds(tokens, start, beside)
    assert found == pytest.approx(seconds_by_steps(cost, tokens, start, chunk, beside), rel=1e-6, abs=1e-9)


def test_more_tokens_further_on_cost_more() -> None:
    forecast = WorkForecast(CostModel(FORMULA), 128)
    assert forecast.recompute_seconds(0) == 0
    assert forecast.recompute_seconds(100) < forecast.recompute_seconds(200) < forecast.recompute_seconds(200, 500)


def test_no_request_is_dropped_before_steps_are_measured() -> None:
    assert WorkForecast(CostModel(FORMULA), 128).least_seconds(10**6, 10**6) == 0


@pytest.mark.parametrize(("prompt", "new"), [(10, 1), (700, 1), (700, 40), (5, 200)])
def test_the_lower_bound_is_close_to_the_time_in_an_empty_batch(prompt: int, new: int) -> None:
    cost = CostModel()
    source = random.Random(0)
    warm_up = [(0.2 * i, make_request(f"w{i}", source.randint(5, 900), new=source.randint(1, 120))) for i in range(30)]
    run_timed(timed_scheduler(cost, cap=256), cost, warm_up, cpu_like, jitter(0))
    done = run_timed(timed_scheduler(cost, cap=256), cost, [(0.0, make_request("a", prompt, new=new))])
    least = WorkForecast(cost, 256).least_seconds(prompt, new)
    assert 0.6 * done.seconds < least < done.seconds


def test_a_request_that_cannot_meet_its_deadline_is_dropped_before_it_is_computed() -> None:
    cost = CostModel()
    scheduler = timed_scheduler(cost, cap=256)
    scheduler.forecast = WorkForecast(cost, 256)
    run_timed(scheduler, cost, [(0.3 * i, make_request(f"w{i}", 300 + 20 * i, new=60)) for i in range(10)])
    late = make_request("late", 2000, new=9, deadline=52.0)  # its prompt alone takes five seconds
    in_time = make_request("in time", 2000, new=9, deadline=60.0)
    scheduler.submit(late, 50.0)
    scheduler.submit(in_time, 50.0)
    plan = scheduler.schedule(50.0)
    assert late.ending == Ending(FinishReason.DEADLINE, CANNOT_MEET_DEADLINE)
    assert [chunk.request for chunk in plan.chunks] == [in_time]

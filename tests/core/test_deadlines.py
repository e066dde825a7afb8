"""Requests that cannot meet their deadline are dropped, and no others."""

from __future__ import annotations

import pytest

from chairlift.core.events import RequestFinished
from chairlift.core.integrity import check_quiescent
from chairlift.core.request import FinishReason
from chairlift.core.sampling.params import SamplingParams
from tests.core.driving import events_of, make_request, make_scheduler, run_to_end, step


class OneSecondPerToken:
    """Every prompt token and every new token takes a second."""

    def least_seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        return prompt_tokens + new_tokens - 1.0


def test_a_request_that_cannot_meet_its_deadline_is_dropped_before_a_token_is_computed() -> None:
    scheduler = make_scheduler(max_batch_tokens=4, forecast=OneSecondPerToken())
    late = make_request("late", 20, deadline=19.0)
    in_time = make_request("in time", 20, deadline=21.0)
    scheduler.submit(late, 0.0)
    scheduler.submit(in_time, 0.0)
    plan = step(scheduler, 0.0)
    assert [chunk.request.id for chunk in plan.chunks] == ["in time"]
    assert late.ending is not None
    assert late.ending.reason is FinishReason.DEADLINE
    assert "in time" in str(late.ending.detail)
    run_to_end(scheduler)
    assert in_time.ending is not None
    assert in_time.ending.reason is FinishReason.LENGTH


def test_a_running_request_is_dropped_too_and_releases_its_memory() -> None:
    scheduler = make_scheduler(max_batch_tokens=4, forecast=OneSecondPerToken())
    scheduler.submit(make_request("a", 20, deadline=25.0), 0.0)
    step(scheduler, 0.0)
    assert scheduler.running
    step(scheduler, 10.0)  # it computed 4 tokens in 10 seconds: 16 are left, and 15 seconds
    assert not scheduler.has_work
    check_quiescent(scheduler)


@pytest.mark.parametrize(
    ("params", "certain"),
    [
        (SamplingParams(max_tokens=9), 1),
        (SamplingParams(max_tokens=9, min_tokens=5), 5),
        (SamplingParams(max_tokens=9, ignore_eos=True), 9),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop="x"), 1),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[4], min_tokens=3), 3),
    ],
)
def test_only_tokens_that_are_certain_count(params: SamplingParams, certain: int) -> None:
    request = make_request("a", 3, new=9, params=params)
    assert request.least_new_tokens == certain
    request.append(77)
    assert request.least_new_tokens == max(1, certain - 1)


def test_cached_tokens_of_a_waiting_request_take_no_time() -> None:
    scheduler = make_scheduler(block_size=4, forecast=OneSecondPerToken())
    scheduler.submit(make_request("first", range(40)), 0.0)
    run_to_end(scheduler)
    scheduler.submit(make_request("again", range(40), new=1, deadline=6.0), 0.0)
    run_to_end(scheduler)
    reasons = {event.request_id: event.ending.reason for event in events_of(scheduler, RequestFinished)}
    assert reasons == {"first": FinishReason.LENGTH, "again": FinishReason.LENGTH}

"""Steps planned before earlier results are read give the same tokens and leak nothing."""

from __future__ import annotations

import random

import pytest

from chairlift.core.events import RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.integrity import check_quiescent
from chairlift.core.request import FinishReason, Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from tests.core.driving import make_request, make_scheduler, run_pipelined, run_to_end


def workload(seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [5000 + index for index in range(24)]
    requests = []
    for index in range(30):
        prompt = shared[: rng.randint(0, 24)] + [rng.randrange(997) for _ in range(rng.randint(1, 40))]
        new = rng.randint(1, 24)
        stops = rng.sample(range(997), 20) if rng.random() < 0.5 else []
        params = SamplingParams(max_tokens=new, stop_token_ids=stops)
        requests.append(make_request(f"r{index}", prompt, new, params=params))
    return requests


def submit_all(scheduler: Scheduler, seed: int) -> None:
    for request in workload(seed):
        scheduler.submit(request, 0.0)


def outcome(scheduler: Scheduler) -> tuple[dict[str, list[int]], dict[str, FinishReason], int]:
    tokens: dict[str, list[int]] = {}
    endings: dict[str, FinishReason] = {}
    preemptions = 0
    for event in scheduler.drain_events():
        if isinstance(event, TokenProduced):
            tokens.setdefault(event.request_id, []).append(event.token)
        elif isinstance(event, RequestFinished):
            assert event.request_id not in endings
            endings[event.request_id] = event.ending.reason
        preemptions += isinstance(event, RequestPreempted)
    return tokens, endings, preemptions


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [22, 200])
@pytest.mark.parametrize("seed", range(6))
def test_planning_ahead_changes_no_token(seed: int, num_blocks: int, depth: int) -> None:
    plain, ahead = (make_scheduler(num_blocks=num_blocks, max_batch_tokens=32) for _ in range(2))
    for scheduler in (plain, ahead):
        submit_all(scheduler, seed)
    run_to_end(plain)
    run_pipelined(ahead, depth)
    expected_tokens, expected_endings, _ = outcome(plain)
    tokens, endings, _ = outcome(ahead)
    assert tokens == expected_tokens
    assert endings == expected_endings
    check_quiescent(ahead)


def test_the_small_pool_preempts() -> None:
    preemptions = 0
    for seed in range(6):
        scheduler = make_scheduler(num_blocks=22, max_batch_tokens=32)
        submit_all(scheduler, seed)
        run_pipelined(scheduler, 1)
        preemptions += outcome(scheduler)[2]
    assert preemptions > 0


def test_a_request_is_not_planned_beyond_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 3, new=2), 0.0)
    first, second, third = (scheduler.schedule(0.0) for _ in range(3))
    assert [(chunk.start, chunk.count) for chunk in (*first.chunks, *second.chunks)] == [(0, 3), (3, 1)]
    assert not third

"""Prompt outputs: every prompt position is read once, whatever is preempted, and prompt-only requests end."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from chairlift.core.events import PromptPooled, PromptScored, RequestAdmitted, RequestFinished, RequestPreempted
from chairlift.core.integrity import check_accounting, check_plan, check_quiescent
from chairlift.core.kv.prefix_index import Miss
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.plan import PromptOutputs, StepPlan, StepResult, TokenLogprobs
from chairlift.core.request import FinishReason, Request
from chairlift.core.sampling.params import Pooling, PoolingKind, SamplingParams
from chairlift.errors import InvalidParameter
from tests.core.driving import events_of, make_request, make_scheduler, run_plan, run_to_end, shape, step

SCORED = SamplingParams(prompt_logprobs=0)
KINDS: list[tuple[SamplingParams, int]] = [  # and the number of new tokens
    (SamplingParams(), 6),
    (SCORED, 4),
    (SCORED.clone(max_tokens=0), 0),
    (SamplingParams(max_tokens=0, pooling=Pooling()), 0),
    (SamplingParams(max_tokens=0, pooling=Pooling(PoolingKind.LAST)), 0),
    (SamplingParams(max_tokens=0), 0),
]


class FakeReader:
    """Scores a token by its id, and pools a prompt to the positions that were read."""

    def __init__(self) -> None:
        self.positions: dict[str, set[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        logprobs, vectors = {}, {}
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.read and request.scores_prompt:
                tokens = [request.tokens[position + 1] for position in chunk.read]
                logprobs[request.id] = [TokenLogprobs(token, 0.0, 1, ()) for token in tokens]
            elif chunk.read:
                self.positions.setdefault(request.id, set()).update(chunk.read)
                if chunk.end == request.num_prompt:
                    vectors[request.id] = [float(position) for position in sorted(self.positions[request.id])]
        return replace(run_plan(plan), prompts=PromptOutputs(logprobs, vectors))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("swap", [False, True])
def test_every_position_is_read_once_under_preemption(depth: int, swap: bool) -> None:
    preemptions = 0
    for seed in range(25):
        chance = random.Random(seed)
        scheduler = make_scheduler(14, 4, 16, chance.choice([3, 8]), swap=SwapSpace(20) if swap else None)
        requests = []
        for number in range(10):
            params, new = chance.choice(KINDS)
            prompt = [*range(8), *range(100, 100 + chance.randint(1, 18))]  # a shared prefix
            requests.append(make_request(f"r{number}", prompt, new, params=params))
        waiting, in_flight, reader, events = deque(requests), deque[StepPlan](), FakeReader(), []
        for turn in range(2000):
            if waiting and chance.random() < 0.3:
                scheduler.submit(waiting.popleft(), float(turn))
            if scheduler.running and chance.random() < 0.1:
                scheduler.state.preempt(chance.choice(scheduler.running), float(turn))
            plan = scheduler.schedule(float(turn))
            check_accounting(scheduler)
            if plan:
                check_plan(scheduler, plan)
                in_flight.append(plan)
            if in_flight and (len(in_flight) > depth or not plan):
                scheduler.apply(reader.run(in_flight.popleft()), float(turn))
            events += scheduler.drain_events()
            if not (waiting or scheduler.has_work or in_flight):
                break
        check_quiescent(scheduler)
        preemptions += sum(isinstance(event, RequestPreempted) for event in events)
        for request in requests:
            check_outputs(request, [event for event in events if getattr(event, "request_id", "") == request.id])
    assert preemptions > 50


def check_outputs(request: Request, events: list[object]) -> None:
    (end,) = [event for event in events if isinstance(event, RequestFinished)]
    assert end.ending.reason is FinishReason.LENGTH
    assert request.num_output == request.max_new_tokens
    scored = [one.token_id for event in events if isinstance(event, PromptScored) for one in event.logprobs]
    assert scored == (list(request.prompt[1:]) if request.scores_prompt else [])
    vectors = [list(event.vector) for event in events if isinstance(event, PromptPooled)]
    pooling, last = request.params.pooling, request.num_prompt - 1
    if pooling is None:
        assert not vectors
    else:
        whole = list(map(float, range(request.num_prompt)))
        assert vectors == [whole if pooling.kind is PoolingKind.MEAN else [float(last)]]


def test_a_scored_prompt_uses_no_cached_prefix_and_leaves_one() -> None:
    scheduler = make_scheduler(block_size=4)
    prompt = list(range(12))
    misses = []
    for number, params in enumerate([SamplingParams(), SCORED, SamplingParams()]):
        scheduler.submit(make_request(f"r{number}", prompt, 1, params=params), 0.0)
        run_to_end(scheduler)
        (admitted,) = events_of(scheduler, RequestAdmitted)
        assert isinstance(admitted, RequestAdmitted)
        misses.append((admitted.cached_tokens, admitted.miss))
    assert misses == [(0, Miss.NEVER_SEEN), (0, Miss.WHOLE_PROMPT), (8, None)]


def test_a_prompt_only_request_ends_with_its_prompt_beside_a_decode() -> None:
    scheduler = make_scheduler(max_batch_tokens=5)
    scheduler.submit(make_request("decode", 1, 9), 0.0)
    step(scheduler)
    scheduler.submit(make_request("prompt", 7, 0, params=SamplingParams(max_tokens=0)), 0.0)
    assert shape(step(scheduler)) == [("decode", 1, 1), ("prompt", 0, 4)]
    assert shape(step(scheduler)) == [("decode", 2, 1), ("prompt", 4, 3)]
    assert [event.request_id for event in events_of(scheduler, RequestFinished)] == ["prompt"]  # type: ignore[attr-defined]
    run_to_end(scheduler)
    check_quiescent(scheduler)


def test_of_several_completions_the_first_scores_the_prompt() -> None:
    scheduler = make_scheduler()
    first = make_request("a", range(9), 2, params=SCORED)
    second = make_request("a#1", range(9), 2, params=SCORED, leader=first)
    for request in (first, second):
        scheduler.submit(request, 0.0)
    read = [(chunk.request.id, chunk.read) for plan in run_to_end(scheduler) for chunk in plan.chunks if chunk.read]
    assert read == [("a", range(8))]


def test_a_prompt_must_fit_as_a_whole() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    scheduler.check_fits(8, 0)
    with pytest.raises(InvalidParameter, match="exceed the KV cache"):
        scheduler.check_fits(9, 0)

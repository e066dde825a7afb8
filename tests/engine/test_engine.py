"""The engine around a fake executor: ids, interruptions, failures and validation."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from chairlift.core.events import Event, RequestFinished, RequestPreempted, TextProduced
from chairlift.core.executor import FinishedStep
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.request import FinishReason
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import EngineDead, InvalidParameter
from tests.engine.fake_executor import PARAMS, interrupt, make_engine, run_to_end, tokens_of


@pytest.mark.parametrize("interrupted_step", range(5))
def test_an_interrupted_step_is_computed_again(interrupted_step: int) -> None:
    """No block and no token is lost, in whichever part of the step the interruption occurs."""
    prompts = [list(range(10, 20)), list(range(30, 60))]
    outputs = []
    for disturbed in (False, True):
        engine, executor = make_engine()
        for prompt in prompts:
            engine.submit(prompt, PARAMS.clone(n=3))
        events: list[Event] = []
        for _ in range(interrupted_step):
            events += engine.step()
        if disturbed:
            executor.before = interrupt
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            check_accounting(engine.scheduler)
            assert not engine.scheduler.running
            executor.before = lambda plan: None
        events += run_to_end(engine)
        check_quiescent(engine.scheduler)
        outputs.append(tokens_of(events))
        assert any(isinstance(event, RequestPreempted) for event in events) == disturbed
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 6 for tokens in outputs[1].values())


def test_repeated_interruptions_leak_no_memory() -> None:
    engine, executor = make_engine(num_blocks=10)
    for _ in range(20):
        executor.before = interrupt
        (request_id,) = engine.submit(list(range(10, 40)), PARAMS)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.cancel(request_id)
        check_quiescent(engine.scheduler)
    executor.before = lambda plan: None
    engine.submit(list(range(10, 40)), PARAMS)
    assert len(tokens_of(run_to_end(engine))) == 1


def test_an_id_is_in_use_until_its_ending_is_reported() -> None:
    engine, _ = make_engine()
    engine.submit([10, 11], PARAMS, request_id="x")
    engine.step()
    engine.cancel("x")
    with pytest.raises(InvalidParameter, match="already in use"):
        engine.submit([10, 11], PARAMS, request_id="x")
    engine.step()
    engine.submit([10, 11], PARAMS, request_id="x")
    events = run_to_end(engine)
    text = "".join(event.text for event in events if isinstance(event, TextProduced))
    assert text == engine.tokenizer.decode(tokens_of(events)["x"])
    assert sum(isinstance(event, RequestFinished) for event in events) == 1


def test_a_failure_while_applying_a_step_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = make_engine()
    ids = [engine.submit([10 + i], PARAMS)[0] for i in range(3)]

    def too_few(plan: StepPlan) -> FinishedStep:
        return FinishedStep(StepResult(plan, [5], [None]))

    monkeypatch.setattr(executor, "launch", too_few)
    events = engine.step()
    endings = {event.request_id: event.ending.reason for event in events if isinstance(event, RequestFinished)}
    assert endings == dict.fromkeys(ids, FinishReason.ERROR)
    with pytest.raises(EngineDead):
        engine.submit([10], PARAMS)


def test_min_tokens_is_checked_against_the_room_in_the_kv_cache() -> None:
    engine, _ = make_engine(num_blocks=5)  # 20 tokens
    with pytest.raises(InvalidParameter) as refusal:
        engine.submit([10] * 10, PARAMS.clone(max_tokens=None, min_tokens=12))
    assert refusal.value.parameter == "min_tokens"
    engine.submit([10] * 10, PARAMS.clone(max_tokens=None, min_tokens=11))
    assert [len(tokens) for tokens in tokens_of(run_to_end(engine)).values()] == [11]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "5"])
def test_a_bad_timeout_is_refused_by_name(timeout: float) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidParameter) as refusal:
        engine.submit([10], PARAMS, timeout=timeout)
    assert refusal.value.parameter == "timeout"


def test_a_salt_that_is_not_valid_unicode_is_accepted() -> None:
    engine, _ = make_engine()
    engine.submit(list(range(10, 30)), PARAMS)
    engine.submit(list(range(10, 30)), PARAMS, cache_salt="\ud800")
    assert len(tokens_of(run_to_end(engine))) == 2


class TokenName(IntEnum):
    """A subclass of int is a valid token."""

    TOKEN = 7


@pytest.mark.parametrize("bad", [-1, 400, 2**32, 2**32 + 5, -(2**70), True, 3.0, "3", None, np.int64(3)])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_an_invalid_token_is_refused_by_name(bad: Any, place: int) -> None:
    engine, _ = make_engine()
    prompt = [3, 399, 0, TokenName.TOKEN, 5, 6, 7, 8, 9]
    engine.check(prompt, PARAMS)
    prompt.insert(place, bad)
    with pytest.raises(InvalidParameter, match=re.escape(repr(bad))) as refusal:
        engine.check(prompt, PARAMS)
    assert refusal.value.parameter == "prompt"
    if isinstance(bad, int) and not isinstance(bad, bool):
        with pytest.raises(InvalidParameter, match=str(bad)) as refusal:
            engine.check([3], PARAMS.clone(stop_token_ids=[3, bad]))
        assert refusal.value.parameter == "stop_token_ids"


def test_a_prompt_must_leave_room_for_output() -> None:
    engine, _ = make_engine()
    engine.check([3] * 99, PARAMS)
    for length in (0, 100, 5000):
        with pytest.raises(InvalidParameter) as refusal:
            engine.check([3] * length, PARAMS)
        assert refusal.value.parameter == "prompt"
        with pytest.raises(InvalidParameter) as from_front_end:
            engine.limits.check_prompt_length(length)
        assert str(from_front_end.value) == str(refusal.value)


def test_beam_search_needs_an_executor_that_finds_candidates() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidParameter, match="beam_width: is not supported"):
        engine.submit([3], SamplingParams(beam_width=2, n=2, max_tokens=4))


def test_the_executor_prepares_only_while_the_engine_is_idle() -> None:
    engine, executor = make_engine()
    executor.num_to_prepare = 2
    assert engine.prepare()
    engine.submit([3], PARAMS)
    assert not engine.prepare()
    run_to_end(engine)
    assert engine.prepare()
    assert not engine.prepare()


def test_a_failure_while_preparing_stops_the_engine() -> None:
    engine, executor = make_engine()
    executor.num_to_prepare = -1
    assert not engine.prepare()
    with pytest.raises(EngineDead, match="nothing to prepare"):
        engine.check_alive()

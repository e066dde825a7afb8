"""The engine launches steps ahead of reading their results, if the executor supports it and steps have no drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from chairlift.core.events import Event, StepDone
from chairlift.core.executor import Executor, ExecutorCapabilities
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.text.tokenizer import Tokenizer
from tests.core.driving import make_scheduler
from tests.engine.host_speed import measure
from tests.text import backends

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)


@dataclass
class RecordingExecutor(Executor):
    """An executor that works one step ahead and records the order of launches and reads."""

    steps_ahead: int = 1
    calls: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(steps_ahead=self.steps_ahead)

    def launch(self, plan: StepPlan) -> RecordedStep:
        self.calls.append(f"launch {plan.step}")
        return RecordedStep(self, plan)


@dataclass
class RecordedStep:
    executor: RecordingExecutor
    plan: StepPlan
    typical: bool = True

    def result(self) -> StepResult:
        if self.executor.interrupted:
            raise KeyboardInterrupt
        self.executor.calls.append(f"read {self.plan.step}")
        tokens = [7 for chunk in self.plan.chunks if chunk.samples]
        return StepResult(self.plan, tokens, [None] * len(tokens))


class Drafting:
    """Speculation that requires each step to be read before the next is planned, but drafts nothing."""

    drafting = True
    speedup = 1.0

    def add_drafts(self, *_: object) -> None:
        pass

    def observe(self, result: StepResult, seconds: float, waited: bool = False, typical: bool = True) -> float:
        assert waited
        return seconds

    def forget(self, request_id: str) -> None:
        pass


def make_engine(executor: Executor, scheduler: Scheduler | None = None) -> Engine:
    tokenizer = Tokenizer(backends.byte_level())
    return Engine(scheduler or make_scheduler(), executor, tokenizer, vocab_size=400, max_model_len=100)


def steps_reported(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepDone)]


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    executor = RecordingExecutor()
    engine = make_engine(executor)
    engine.submit([3, 4, 5], PARAMS)
    reported = []
    while engine.has_work:
        reported.append(steps_reported(engine.step()))
    assert executor.calls == [
        *("launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"),
    ]
    assert reported == [[], [0], [1], [2], [3]]
    check_quiescent(engine.scheduler)


@pytest.mark.parametrize("drafting", [True, False])
def test_each_step_is_read_first_with_drafts_or_a_synchronous_executor(drafting: bool) -> None:
    """While steps carry drafts, or with an executor that does not work ahead."""
    executor = RecordingExecutor(steps_ahead=1 if drafting else 0)
    engine = make_engine(executor, make_scheduler(speculation=Drafting() if drafting else None))  # type: ignore[arg-type]
    engine.submit([3, 4, 5], PARAMS)
    while engine.has_work:
        engine.step()
    assert executor.calls == [call for step in range(4) for call in (f"launch {step}", f"read {step}")]


def test_all_steps_in_flight_are_computed_again_after_an_interruption() -> None:
    executor = RecordingExecutor()
    engine = make_engine(executor)
    engine.submit([3, 4, 5], PARAMS)
    engine.step()
    executor.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_accounting(engine.scheduler)
    assert not engine.scheduler.running
    executor.interrupted = False
    while engine.has_work:
        engine.step()
    assert executor.calls.count("read 0") == executor.calls.count("read 1") == 0
    assert sum(call.startswith("read") for call in executor.calls) == 4
    check_quiescent(engine.scheduler)


def test_the_measurement_of_the_host_runs() -> None:
    assert "2 requests, temperature 0: step " in measure(2, 0.0)

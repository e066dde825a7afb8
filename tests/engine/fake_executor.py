"""An engine around a fake executor, which needs no model."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.core.events import Event, TokenProduced
from chairlift.core.executor import Executor, FinishedStep
from chairlift.core.integrity import check_accounting
from chairlift.core.plan import StepPlan
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.text.tokenizer import Tokenizer
from tests.core.driving import deterministic_token, make_scheduler, run_plan
from tests.text import backends

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


class FakeExecutor(Executor):
    """Samples tokens that depend on the request's own tokens alone; `before` is called before each step."""

    def __init__(self) -> None:
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.forgotten: list[str] = []
        self.num_to_prepare = 0

    def launch(self, plan: StepPlan) -> FinishedStep:
        self.before(plan)
        return FinishedStep(run_plan(plan, lambda request: 3 + deterministic_token(request) % 300))

    def prepare(self) -> bool:
        if self.num_to_prepare < 0:
            raise RuntimeError("nothing to prepare")
        left, self.num_to_prepare = self.num_to_prepare, max(0, self.num_to_prepare - 1)
        return left > 0

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def make_engine(num_blocks: int = 40) -> tuple[Engine, FakeExecutor]:
    executor = FakeExecutor()
    tokenizer = Tokenizer(backends.byte_level())
    return Engine(make_scheduler(num_blocks), executor, tokenizer, vocab_size=400, max_model_len=100), executor


def run_to_end(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        check_accounting(engine.scheduler)
    return events


def tokens_of(events: list[Event]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, TokenProduced):
            tokens.setdefault(event.request_id, []).append(event.token)
    return tokens


def interrupt(plan: StepPlan) -> None:
    raise KeyboardInterrupt

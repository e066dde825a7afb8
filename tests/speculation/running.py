"""A tiny model, with and without speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, Event, RequestFinished, RequestPreempted, TextProduced, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent, check_shared_prefixes
from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.request import Ending, Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.speculation.control.controller import Proposer
from chairlift.speculation.control.draft_length import FixedLength
from chairlift.speculation.setup import make_speculation
from tests.speculation.guessing import Guesser

Work = Sequence[tuple[Sequence[int], SamplingParams]]


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ending: Ending | None = None


@dataclass
class Run:
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    proposed: int = 0
    accepted: int = 0

    def take_in(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TokenProduced():
                    self.outcomes[event.request_id].tokens.append(event.token)
                    self.outcomes[event.request_id].logprobs.append(event.logprobs)
                case TextProduced():
                    self.outcomes[event.request_id].text += event.text
                case RequestFinished():
                    self.outcomes[event.request_id].ending = event.ending
                case RequestPreempted():
                    self.preemptions += 1
                case DraftsVerified():
                    self.proposed += event.proposed
                    self.accepted += event.accepted
                case _:
                    pass


def start(tiny: LoadedModel, proposer: Proposer | None = None, length: int = 5, **options: Any) -> Engine:
    """An engine with this proposer, if not with what the options say."""
    options = {"device": "cpu", "dtype": "float32", "block_size": 4, "kv_memory": "2MiB", "seed": 7} | options
    engine = start_engine(tiny, EngineConfig(**options)).engine
    if proposer is not None:
        speculation = make_speculation(proposer, length, engine.cost_model, engine._structured)
        assert isinstance(speculation.length, FixedLength)
        engine.scheduler.speculation = speculation
    return engine


def run(engine: Engine, work: Work, arrive: Callable[[int], bool] = lambda index: False) -> Run:
    """All of it, with the books checked after every step; with `arrive`, a step is made before some arrivals."""
    found = Run()

    def step() -> None:
        found.take_in(engine.step())
        found.steps += 1
        check_accounting(engine.scheduler)
        check_shared_prefixes(engine.scheduler)

    for index, (prompt, params) in enumerate(work):
        if arrive(index):
            step()
        for request_id in engine.submit(prompt, params):
            found.outcomes[request_id] = Outcome()
    engine.expect_no_more()
    while engine.has_work:
        step()
        assert found.steps < 10_000
    assert engine.fatal is None, engine.fatal
    check_quiescent(engine.scheduler)
    return found


def knows_better(found: Run, seed: int = 0, vocab: int = 320) -> Guesser:
    """A proposer that knows what each request will get, and says so some of the time."""

    def rest(request: Request, length: int) -> Sequence[int]:
        return found.outcomes[request.id].tokens[request.num_output : request.num_output + length]

    return Guesser(rest, vocab=vocab, seed=seed)

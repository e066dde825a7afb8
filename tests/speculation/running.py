"""Runs of a tiny model, with and without speculation, and workloads for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, Event, RequestFinished, RequestPreempted, TextProduced, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent, check_shared_prefixes
from chairlift.core.plan import TokenLogprobs
from chairlift.core.request import Ending, Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.models.decoder import Decoder
from chairlift.runner.base import ModelRunner
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.drafter import DraftNetwork
from chairlift.speculation.proposers.base import Proposer
from tests.speculation.drafting import RandomProposer

Work = Sequence[tuple[Sequence[int], SamplingParams]]


@dataclass
class RequestOutcome:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ending: Ending | None = None


@dataclass
class Run:
    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, events: Sequence[Event]) -> None:
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
    """An engine with this proposer, or with what the options name."""
    options = {"device": "cpu", "dtype": "float32", "block_size": 4, "kv_memory": "2MiB", "seed": 7} | options
    engine = start_engine(tiny, EngineConfig(**options)).engine
    if proposer is not None:
        structured = engine.structured
        engine.scheduler.speculation = SpeculationController(
            proposer,
            draft_length=length,
            num_allowed=structured.num_allowed if structured else None,
        )
    return engine


def run(engine: Engine, work: Work, arrive: Callable[[int], bool] = lambda index: False) -> Run:
    """Run all of it, checking the KV accounting after every step; with `arrive`, a step precedes some arrivals."""
    found = Run()

    def step() -> None:
        found.add(engine.step())
        found.steps += 1
        check_accounting(engine.scheduler)
        check_shared_prefixes(engine.scheduler)

    for index, (prompt, params) in enumerate(work):
        if arrive(index):
            step()
        for request_id in engine.submit(prompt, params):
            found.outcomes[request_id] = RequestOutcome()
    engine.expect_no_more()
    while engine.has_work:
        step()
        assert found.steps < 10_000
    assert engine.fatal is None, engine.fatal
    check_quiescent(engine.scheduler)
    return found


def often_right(found: Run, seed: int = 0, vocab: int = 320) -> RandomProposer:
    """A proposer that proposes what each request got in another run, some of the time."""

    def rest(request: Request, length: int) -> Sequence[int]:
        return found.outcomes[request.id].tokens[request.num_output : request.num_output + length]

    return RandomProposer(rest, vocab=vocab, seed=seed)


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_batch_tokens": 16, "max_prefill_tokens": 5},
    "preempted": {"kv_memory": "40KiB", "max_batch_requests": 8},
    "swapped": {"kv_memory": "40KiB", "max_batch_requests": 8, "preemption": "swap", "swap_memory": "1MiB"},
    "static": {"policy": "static"},
    "uncached": {"prefix_caching": False},
    "bursted": {"attention": "bursted"},
    "padded": {"attention": "padded"},
}


def uneven_work(count: int, params: SamplingParams = GREEDY) -> Work:
    """Prompts of uneven lengths, some with a common prefix, which repeat themselves."""
    prompts = [[3 + (7 * (i % 3) + j % 11) % 300 for j in range(2 + 11 * i % 41)] for i in range(count)]
    return [(prompt, params.clone(max_tokens=1 + (5 * i) % 24)) for i, prompt in enumerate(prompts)]


def assert_same_output(one: Run, other: Run) -> None:
    assert {name: outcome.tokens for name, outcome in one.outcomes.items()} == {
        name: outcome.tokens for name, outcome in other.outcomes.items()
    }
    for name, outcome in one.outcomes.items():
        assert (outcome.text, outcome.ending) == (other.outcomes[name].text, other.outcomes[name].ending)


def run_with_pauses(index: int) -> bool:
    """For `arrive`: a step before every other arrival."""
    return index % 2 == 0


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.executor, ModelRunner)
    return engine.executor


def drafter_of(engine: Engine) -> DraftModelProposer:
    drafter = runner_of(engine).drafter
    assert isinstance(drafter, DraftModelProposer)
    return drafter


def speculation_of(engine: Engine) -> SpeculationController:
    assert isinstance(engine.scheduler.speculation, SpeculationController)
    return engine.scheduler.speculation


def decoder_of(loaded: LoadedModel) -> Decoder:
    assert isinstance(loaded.model, Decoder)
    return loaded.model


def proposer_with(engine: Engine, network: DraftNetwork, *, repeatable: bool = False) -> DraftModelProposer:
    runner = runner_of(engine)
    return DraftModelProposer("test", network, runner.attention, runner.storage, runner.model, repeatable)

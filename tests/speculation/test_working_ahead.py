"""Guesses on a device that is given its next step before the last one is read, on a clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.cost_model import CostModel
from chairlift.core.events import TokenProduced
from chairlift.core.executor import Executor, ExecutorCapabilities
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.policies.continuous import ContinuousPolicy
from chairlift.core.request import Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.speculation.control.controller import SpeculationController, Wanted
from chairlift.speculation.control.draft_length import AdaptiveLength
from chairlift.speculation.control.payoff import DraftPayoff
from chairlift.text.tokenizer import Tokenizer
from tests.text import backends

KERNEL_BY_KERNEL, CAPTURE = 8e-3, 0.2
HOST, STEP, TOKEN = 0.3e-3, 1e-3, 0.01e-3  # seconds: planning and reading a step, computing it, and each token of it


def right_token(place: int) -> int:
    return (17 * place + 5) % 250


@dataclass
class Device(Executor):
    """Computes one step after the other, while the host does something else."""

    now: float = 0.0
    free_at: float = 0.0

    def clock(self) -> float:
        return self.now

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(steps_ahead=1)

    def launch(self, plan: StepPlan) -> Pending:
        self.now += HOST
        self.free_at = max(self.now, self.free_at) + STEP + TOKEN * plan.num_tokens
        return Pending(self, plan, self.free_at)


@dataclass
class Capturing(Device):
    """The first step of a size is launched kernel by kernel; the second is captured, while nothing else is done."""

    met: Counter[int] = field(default_factory=Counter)

    def launch(self, plan: StepPlan) -> Pending:
        size = -(-plan.num_tokens // 8)
        self.met[size] += 1
        typical = self.met[size] not in (1, 2)
        if not typical:
            self.now = max(self.now + KERNEL_BY_KERNEL, self.free_at)
        if self.met[size] == 2:
            self.now += CAPTURE
        return replace(super().launch(plan), typical=typical)


@dataclass
class Pending:
    device: Device
    plan: StepPlan
    done_at: float
    typical: bool = True

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.done_at)
        tokens: list[int] = []
        accepted = {}
        for chunk in self.plan.chunks:
            place, right = chunk.known_end - chunk.request.num_prompt, 0
            while right < len(chunk.drafts) and chunk.drafts[right] == right_token(place + right):
                right += 1
            tokens += [right_token(place + i) for i in range(right + 1)]
            accepted[chunk.request.id] = right
        return StepResult(self.plan, tokens, [None] * len(tokens), accepted=accepted)


@dataclass
class Proposer:
    """`right` or not; and with `words` only now and then something to say at all."""

    right: bool
    words: float = 1.0
    name: str = "test"
    max_length: int = 7
    judges: bool = False
    sleeps: bool = False
    asleep: bool = False
    spent: float = 0.0
    catching_up: float = 0.0
    asked: list[int] = field(default_factory=list)

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        return [0 if request.num_known % 100 < 100 * self.words else None for request in requests]

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.asked += [one.length for one in wanted]
        return [
            [right_token(one.request.num_output + i) if self.right else 251 for i in range(one.length)]
            for one in wanted
        ]

    def seconds(self, num_requests: int, length: int) -> float:
        return 0.0

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def seconds_for(
    proposer: Proposer | None,
    batch: int,
    tokens: int = 600,
    device: Device | None = None,
    payoff: DraftPayoff | None = None,
) -> float:
    device, cost = device or Device(), CostModel()
    speculation = None if proposer is None else SpeculationController(proposer, AdaptiveLength(cost))
    if speculation is not None and payoff is not None:
        speculation.length.payoff = payoff
    scheduler = Scheduler(KVCache(4096, 16), FixedBudget.of(512), ContinuousPolicy(), batch, speculation=speculation)
    engine = Engine(
        scheduler,
        device,
        Tokenizer(backends.byte_level()),
        vocab_size=256,
        max_model_len=2048,
        cost_model=cost,
        clock=device.clock,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    found: dict[str, list[int]] = {engine.submit([1, 2, 3], params)[0]: [] for _ in range(batch)}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                found[event.request_id].append(event.token)
    assert engine.fatal is None, engine.fatal
    assert all(one == [right_token(place) for place in range(tokens)] for one in found.values())
    return device.now


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("words", [1.0, 0.3, 0.05])
def test_wrong_guesses_cost_little(batch: int, words: float) -> None:
    proposer = Proposer(right=False, words=words)
    assert seconds_for(proposer, batch) < 1.03 * seconds_for(None, batch)
    assert proposer.asked


@pytest.mark.parametrize("batch", [1, 4])
def test_right_guesses_are_worth_waiting_for(batch: int) -> None:
    assert seconds_for(Proposer(right=True), batch) < 0.4 * seconds_for(None, batch)
    assert seconds_for(Proposer(right=True, words=0.5), batch) < 0.8 * seconds_for(None, batch)


@pytest.mark.parametrize("right", [True, False])
def test_steps_that_are_captured_say_nothing_about_guesses(right: bool) -> None:
    """Neither against right ones, if the steps with them are captured, nor for wrong ones, if those without are."""
    batch = 16
    captured_before = batch if right else 2 * batch  # tokens: of steps without guesses, or with one of each request
    asked = []
    for device in (Device(), Capturing(met=Counter({captured_before // 8: 2}))):
        proposer = Proposer(right=right, max_length=1)
        seconds_for(proposer, batch, tokens=900, device=device)
        asked.append(len(proposer.asked) // batch)
    assert asked[1] == pytest.approx(asked[0], rel=0.1)
    assert asked[0] > 300 if right else asked[0] < 10


@pytest.mark.parametrize("batch", [2, 48])
def test_nor_do_they_say_what_a_token_costs(batch: int) -> None:
    """With guesses for a third of the text: fewer steps to learn from."""
    asked = []
    for device in (Device(), Capturing()):
        proposer = Proposer(right=True, words=0.3, max_length=3)
        seconds_for(proposer, batch, tokens=900, device=device)
        asked.append(len(proposer.asked) // batch)
    assert asked[1] > 0.6 * asked[0] > 10


class Watched(DraftPayoff):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def observe(self, num_requests: int, guessed: bool, num_accepted: int, seconds: float, **more: Any) -> None:
        self.seconds.append(seconds)
        super().observe(num_requests, guessed, num_accepted, seconds, **more)


def test_nor_do_those_that_were_under_way_meanwhile() -> None:
    """They are read once the next one is launched."""
    payoff = Watched()
    proposer = Proposer(right=True, words=0.0)
    device = Capturing(met=Counter({1: -20}))  # so the 21st and 22nd steps are slow
    seconds_for(proposer, 1, 40, device, payoff)
    assert 40 - 2 - 3 <= len(payoff.seconds) < 40
    assert max(payoff.seconds) < KERNEL_BY_KERNEL

"""While guesses pause for long, the draft head sleeps: it computes prompts only, and nothing that comes out changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, StepDone
from chairlift.core.plan import StepPlan
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model
from chairlift.runner.base import ModelRunner
from chairlift.runner.host_blocks import make_copies
from chairlift.speculation.control.controller import Wanted
from chairlift.speculation.control.draft_length import AdaptiveLength, FixedLength
from chairlift.speculation.control.payoff import _FIRST_PAUSE, _FIRST_PAUSE_OF_MANY, _WAKING, DraftPayoff, Pace, _Batch
from chairlift.speculation.head_network import Head
from chairlift.speculation.networks import ComputedBatch
from tests.speculation.running import run, start
from tests.speculation.test_draft_length import cost_model
from tests.speculation.test_same_output import GREEDY, SETTINGS, same, uneven_work


class Dozing(FixedLength):
    """Asleep for some steps, and then awake for some."""

    def __init__(self) -> None:
        super().__init__(3)
        self._turn = 0

    def sleeps(self, num_requests: int) -> bool:
        self._turn += 1
        return self._asleep

    def allows_drafts(self, num_requests: int) -> bool:
        return not self._asleep

    @property
    def _asleep(self) -> bool:
        return self._turn % 12 < 6


class Watched:
    """What the draft head of an engine does in each step that it is shown, and what it looks back at when it guesses.

    Whoever gets a block finds NaN in the head's part of it. So what the head reads must have been written, for this
    request or one that it shares the block with."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, speculation = engine.executor, engine.scheduler.speculation
        assert isinstance(runner, ModelRunner)
        assert runner.drafter is not None
        assert speculation is not None
        network = runner.drafter.network
        assert isinstance(network, Head)
        self.steps: list[tuple[bool, bool, bool]] = []  # asleep, with prompts, and whether anything was computed
        self.num_looked_at = 0
        self._computed = False
        layer, storage = network._head.attention_layers[0].index, runner.storage
        follow, propose, pool = network.follow, speculation.proposer.propose, engine.scheduler.kv.pool
        take, taken = pool.take, list[int]()

        def note_step(step: ComputedBatch) -> None:
            self._computed = False
            follow(step)
            prompts = not all(chunk.decodes for chunk in step.plan.chunks)
            self.steps.append((network.asleep, prompts, self._computed))

        def noting(compute: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*given: Any) -> Any:
                self._computed = True
                return compute(*given)

            return noted

        def look(wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
            drafts = propose(wanted)
            for one in wanted:
                for side in storage.read(layer, torch.tensor(one.table), one.request.num_known, torch.float32):
                    assert side.isfinite().all()
                self.num_looked_at += 1
            return drafts

        def note_taken(count: int) -> list[int] | None:
            blocks = take(count)
            taken.extend(blocks or [])
            return blocks

        def poison_and_copy(plan: StepPlan, *places: Any) -> None:
            make_copies(StepPlan(plan.step, (), swap_outs=plan.swap_outs), *places)  # of what was there before
            storage.keys[layer][taken] = storage.values[layer][taken] = torch.nan
            taken.clear()
            make_copies(replace(plan, swap_outs=()), *places)

        monkeypatch.setattr(network, "follow", note_step)
        for name in ("features", "states", "remember"):
            monkeypatch.setattr(network._head, name, noting(getattr(network._head, name)))
        monkeypatch.setattr(speculation.proposer, "propose", look)
        monkeypatch.setattr(pool, "take", note_taken)
        monkeypatch.setattr("chairlift.runner.cpu.make_copies", poison_and_copy)


@pytest.mark.parametrize("setting", ["plain", "chunked", "preempted", "swapped", "8 bit"])
def test_only_prompts_are_computed_asleep_and_all_comes_out_the_same(
    tiny: LoadedModel, folder: Path, draft: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SETTINGS.get(setting, {})
    rounded = EngineConfig(device="cpu", quantization="int8")
    model = load_model(str(folder), rounded, progress=False) if setting == "8 bit" else tiny
    # Copies of blocks: two completions of one prompt.
    twice = (list(range(3, 30)), SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=14, ignore_eos=True))
    work = [*uneven_work(14), twice, *uneven_work(6)]
    plain = run(start(model, **options), work, arrive=lambda index: index % 2 == 0)
    more = {"kv_memory": "60KiB"} if "kv_memory" in options else {}  # for the head has a layer as well
    engine = start(model, speculate=f"draft:{draft}", **options | more)
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation.length = Dozing()
    watched = Watched(engine, monkeypatch)
    dozing = run(engine, work, arrive=lambda index: index % 2 == 0)
    same(plain, dozing)
    assert (dozing.preemptions > 0) == (setting in ("preempted", "swapped"))
    assert all(computed == (prompts or not asleep) for asleep, prompts, computed in watched.steps)
    assert {(asleep, prompts) for asleep, prompts, _ in watched.steps} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert dozing.proposed > 20
    assert watched.num_looked_at > 20


def test_the_head_wakes_some_steps_before_a_pause_ends(
    tiny: LoadedModel, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tiny, speculate=f"draft:{draft}")
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation.length = length = AdaptiveLength(cost_model(step=1.0, token=0.0001))
    length.payoff._batches[1] = _Batch(plain=Pace(1.0, 1.0, 99), pause=2 * _WAKING + 9)
    watched = Watched(engine, monkeypatch)
    engine.submit(list(range(3, 30)), GREEDY.clone(max_tokens=90))
    verified: list[int] = []  # in which steps
    while engine.has_work:
        events = engine.step()
        step = next(event.step for event in events if isinstance(event, StepDone))
        verified += [step for event in events if isinstance(event, DraftsVerified)]
    asleep = [asleep for asleep, _, _ in watched.steps]
    assert asleep[: 2 * _WAKING + 10] == [False] * _WAKING + [True] * 9 + [False] * (_WAKING + 1)
    assert verified[0] == 2 * _WAKING + 9


def test_only_a_pause_is_for_sleeping_and_only_at_its_size_of_batch() -> None:
    payoff = DraftPayoff()
    asleep: list[bool] = []
    pauses: list[int] = []
    for _ in range(_FIRST_PAUSE + 15):
        asleep.append(payoff.sleeps(5))
        drafts = payoff.allows_drafts(5)
        payoff.observe(5, drafts, 0, 2.0 if drafts else 1.0)
        pauses.append(payoff._batches[3].pause)
    begun = next(step for step, pause in enumerate(pauses) if pause)
    assert begun > 6, "there is no sleep before they are tried, nor while steps without them are measured"
    first, last = begun + _WAKING, begun + _FIRST_PAUSE - _WAKING
    assert asleep == [first < step <= last for step in range(len(asleep))]


def test_a_size_that_pauses_now_and_then_does_not_put_the_others_to_sleep() -> None:
    payoff = DraftPayoff()
    for size in (7, 8):
        payoff._batch(size).plain = Pace(1.0, 1.0, 99)
    payoff._batch(8).pause = 1000
    for step in range(300):
        size = 8 if step % 3 else 7
        assert not payoff.sleeps(size)
        assert payoff.allows_drafts(size) == (size == 7)
        payoff._batch(7).since_plain = 0


def test_who_has_just_woken_does_not_guess_for_others_at_once() -> None:
    payoff = DraftPayoff()
    for size in (7, 8):
        payoff._batch(size).plain = Pace(1.0, 1.0, 99)
    payoff._batch(8).pause = 1000
    asleep = []
    for _ in range(3 * _WAKING):
        asleep.append(payoff.sleeps(8))
        assert not payoff.allows_drafts(8)
    assert asleep[-1]
    allowed = []
    for _ in range(_WAKING + 3):
        assert not payoff.sleeps(7)
        allowed.append(payoff.allows_drafts(7))
    assert allowed == [False] * (_WAKING - 1) + [True] * 4


def test_many_that_were_tried_in_vain_pause_for_longer() -> None:
    pauses = {}
    for size in (4, 8, 64):
        payoff = DraftPayoff()
        while not payoff._batch(size).pause:
            drafts = payoff.allows_drafts(size)
            payoff.observe(size, drafts, 0, 2.0 if drafts else 1.0)
        pauses[size] = payoff._batch(size).pause
    assert pauses[4] < pauses[8] == pauses[64]


def test_what_a_draft_adds_is_not_forgiven_while_none_may_be_tried() -> None:
    payoff = DraftPayoff()
    batch = payoff._batch(4)
    batch.slope.value = 1.0
    batch.pause = 9
    payoff.observe(4, False, 0, 1.0)
    assert batch.slope.value == 1.0
    batch.pause = 0
    payoff.observe(4, False, 0, 1.0)
    assert batch.slope.value < 1.0


def test_where_not_even_a_sure_guess_would_pay_nobody_looks_for_a_while() -> None:
    payoff = DraftPayoff()
    payoff._batch(64).plain = Pace(1.0, 1.0, 99)
    payoff._batch(64).slope.value = 1.0
    looked, asleep = [], 0
    for step in range(7 + _FIRST_PAUSE_OF_MANY):
        asleep += payoff.sleeps(64)
        if payoff.allows_drafts(64):
            looked.append(step)
            payoff.note_hope(64, False)
    assert looked == [0, 1, 2, 3, 4, 5, 6 + _FIRST_PAUSE_OF_MANY]
    assert asleep == _FIRST_PAUSE_OF_MANY - 2 * _WAKING
    assert payoff.slope(64).value < 0.1  # type: ignore[operator]  # what has forbidden them may have been wrong


def test_a_step_in_which_a_guess_might_have_paid_is_hope_enough() -> None:
    payoff = DraftPayoff()
    payoff._batch(4).plain = Pace(1.0, 1.0, 99)
    for step in range(100):
        assert payoff.allows_drafts(4)
        payoff.note_hope(4, hope=step % 5 == 0)


@pytest.mark.parametrize("size", [4, 16])
def test_after_guesses_that_paid_a_pause_is_short_again(size: int) -> None:
    payoff = DraftPayoff()
    batch = payoff._batch(size)
    first = batch.next_pause
    batch.next_pause = 8 * first
    for _ in range(200):
        drafts = payoff.allows_drafts(size)
        payoff.observe(size, drafts, 2 * size if drafts else 0, 1.0)
    assert batch.next_pause == first

"""A network leaves out guesses of which it is not sure enough, and learns how sure that must be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift.runner.base import ModelRunner
from chairlift.speculation.control.confidence import LEVELS, Confidence
from chairlift.speculation.control.controller import SpeculationController, Wanted
from chairlift.speculation.control.draft_length import FixedLength
from chairlift.speculation.networks import FirstLayers
from tests.speculation.running import run, start
from tests.speculation.test_networks import proposer_of
from tests.speculation.test_same_output import same, uneven_work


def test_each_level_is_as_right_as_its_guesses_were() -> None:
    """A network that is right more often than it thinks, but for what it is surest of."""
    known, chance = Confidence(), random.Random(0)
    truth = [0.1, 0.3, 0.4, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.6]
    for _ in range(4000):
        levels = [chance.randrange(LEVELS) for _ in range(4)]
        wrong = [place for place, level in enumerate(levels) if chance.random() > truth[level]]
        known.learn(levels, accepted=wrong[0] if wrong else len(levels))
    assert known.chances == pytest.approx(truth, abs=0.2)


def test_bad_luck_is_forgotten_though_nothing_more_of_its_kind_is_tried() -> None:
    known = Confidence()
    before = known.chances[2]
    for _ in range(12):
        known.learn([2], accepted=0)
    assert known.chances[2] < before / 2
    for _ in range(1000):
        known.learn([9], accepted=1)
    assert known.chances[2] == pytest.approx(before, abs=0.02)
    assert known.chances[9] > 0.97


class AtLeast(FixedLength):
    """Always four, of which those are left out that are less likely."""

    def __init__(self, least: float) -> None:
        super().__init__(4)
        self.least = least


def test_bad_luck_is_forgotten_though_nothing_is_verified_any_more(tiny: LoadedModel) -> None:
    engine = start(tiny)
    model = tiny.model
    assert isinstance(model, Decoder)
    proposer = proposer_of(engine, FirstLayers(model, 1))
    engine.scheduler.speculation = SpeculationController(proposer, AtLeast(1.0))
    known = proposer._confidence[True]
    before = known.chances[2]
    for _ in range(4):
        known.learn([2], accepted=0)
    assert known.chances[2] < 0.6 * before
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    assert run(engine, [([70 + i, 80, 90], params) for i in range(4)]).proposed == 0
    assert known.chances[2] > 0.8 * before


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_left_out_changes_nothing_that_comes_out(tiny: LoadedModel, temperature: float) -> None:
    """And it is what the network was least sure of that is left out."""
    work = [(prompt, params.clone(temperature=temperature, seed=7)) for prompt, params in uneven_work(6)]
    model = tiny.model
    assert isinstance(model, Decoder)
    proposed = []
    for least in (0.0, 0.02, 1.0):
        engine = start(tiny)
        engine.scheduler.speculation = SpeculationController(proposer_of(engine, FirstLayers(model, 1)), AtLeast(least))
        found = run(engine, work)
        same(run(start(tiny), work), found)
        proposed.append(found.proposed)
    assert proposed[0] > proposed[1] > proposed[2] == 0


def test_whether_a_drawn_guess_is_left_out_does_not_hang_on_what_was_drawn(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Confidence, "fade", lambda self: None)  # so that being asked twice makes no difference
    engine = start(tiny)
    model = tiny.model
    assert isinstance(model, Decoder)
    proposer = proposer_of(engine, FirstLayers(model, 1))
    engine.scheduler.speculation = speculation = SpeculationController(proposer, AtLeast(0.02))
    levels: list[tuple[Sequence[int], list[int]]] = []
    propose = proposer.propose

    def twice(wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        first, sure = propose(wanted), {name: list(some) for name, some in proposer._levels.items()}
        for one in wanted:
            one.request.seed += 1  # another draw from the same
        again = propose(wanted)
        for one, some, more in zip(wanted, first, again, strict=True):
            assert bool(some) == bool(more), "of the first guess, only what it was drawn from counts"
            if some and more:
                assert sure[one.request.id][0] == proposer._levels[one.request.id][0]
                levels.append((some, list(more)))
        return again

    speculation.proposer.propose = twice  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    run(engine, [([70 + i, 80, 90], params) for i in range(3)])
    assert any(some[0] != more[0] for some, more in levels)


def test_a_head_keeps_of_prompts_what_computing_all_of_it_would(folder: Path, draft: Path) -> None:
    """Its keys and values, without attending to anything or making states that nobody reads."""
    from chairlift.config import EngineConfig
    from chairlift.engine.startup import load_model

    rounded = load_model(str(folder), EngineConfig(device="cpu", quantization="int8"), progress=False)
    kept = []
    for one_call in (True, False):
        engine = start(rounded, speculate=f"draft:{draft}", max_prefill_tokens=9)
        runner = engine.executor
        assert isinstance(runner, ModelRunner)
        assert runner.drafter is not None
        runner.drafter.network.one_call = one_call  # type: ignore[attr-defined]
        engine.submit(list(range(40, 65)), SamplingParams(temperature=0.0, max_tokens=1))
        while engine.has_work:
            engine.step()
        layer = len(rounded.model.attention_layers)
        kept.append(torch.cat([runner.storage.keys[layer].flatten(1), runner.storage.values[layer].flatten(1)]).float())
    assert kept[0].abs().sum() > 10
    assert torch.allclose(*kept, atol=0.02 * float(kept[1].abs().max()))

"""A draft model leaves out draft tokens that it is not sure enough of; the controller learns how sure that must be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model
from chairlift.speculation.control.controller import Calibration
from chairlift.speculation.control.payoff import SpeculationTuning
from chairlift.speculation.draft_models import FirstLayers, HeadNetwork
from chairlift.speculation.proposers.base import LEVELS, Draft, DraftTerms
from tests.speculation.drafting import LeastChance
from tests.speculation.running import (
    assert_same_output,
    decoder_of,
    drafter_of,
    proposer_with,
    run,
    runner_of,
    start,
    uneven_work,
)


def test_each_level_converges_to_the_acceptance_of_its_draft_tokens() -> None:
    """A model that is right more often than its probabilities say, except at the highest level."""
    known, chance = Calibration(SpeculationTuning()), random.Random(0)
    truth = [0.1, 0.3, 0.4, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.6]
    for _ in range(4000):
        levels = [chance.randrange(LEVELS) for _ in range(4)]
        wrong = [place for place, level in enumerate(levels) if chance.random() > truth[level]]
        known.learn(levels, accepted=wrong[0] if wrong else len(levels))
    assert known.chances == pytest.approx(truth, abs=0.05)


def test_the_first_wrong_draft_token_counts_and_those_behind_it_do_not() -> None:
    known = Calibration(SpeculationTuning())
    before = known.chances
    known.learn([1, 3, 5, 7], accepted=2)
    after = known.chances
    assert after[1] > before[1]
    assert after[3] > before[3]
    assert after[5] < before[5]
    assert after[7] == before[7]


def use_first_layer(engine: Engine, tiny: LoadedModel, least: float) -> LeastChance:
    """Drafts of four tokens by the model's first layer, of which those with a lower chance are left out."""
    proposer = proposer_with(engine, FirstLayers(decoder_of(tiny), 1))
    speculation = LeastChance(proposer, draft_length=4)
    speculation.least = least
    engine.scheduler.speculation = speculation
    return speculation


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_leaving_out_unlikely_drafts_does_not_change_the_output(tiny: LoadedModel, temperature: float) -> None:
    work = [(prompt, params.clone(temperature=temperature, seed=7)) for prompt, params in uneven_work(6)]
    proposed = []
    for least in (0.0, 0.02, 1.0):
        engine = start(tiny)
        use_first_layer(engine, tiny, least)
        found = run(engine, work)
        assert_same_output(run(start(tiny), work), found)
        proposed.append(found.proposed)
    assert proposed[0] > proposed[1] > proposed[2] == 0


def test_whether_a_sampled_draft_token_is_left_out_does_not_depend_on_the_token(tiny: LoadedModel) -> None:
    engine = start(tiny)
    proposer = use_first_layer(engine, tiny, 0.02).proposer
    pairs: list[tuple[Draft, Draft]] = []
    propose = proposer.propose

    def twice(requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft | None]:
        first = propose(requests, terms)
        for request in requests:
            request.seed += 1  # another draw from the same distribution
        again = propose(requests, terms)
        for one, other in zip(first, again, strict=True):
            assert one is not None
            assert other is not None
            assert bool(one.tokens) == bool(other.tokens)
            if one.tokens:
                assert one.levels[0] == other.levels[0]
                pairs.append((one, other))
        return again

    proposer.propose = twice  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    run(engine, [([70 + i, 80, 90], params) for i in range(3)])
    assert any(one.tokens[0] != other.tokens[0] for one, other in pairs)


@pytest.mark.slow
def test_a_head_stores_the_same_for_prompts_with_and_without_computing_states(folder: Path, draft: Path) -> None:
    """Keys and values of its one layer do not depend on attention, so the rest need not be computed."""
    rounded = load_model(str(folder), EngineConfig(device="cpu", quantization="int8"), progress=False)
    kept = []
    for in_one_call in (True, False):
        engine = start(rounded, speculate=f"draft:{draft}", max_prefill_tokens=9)
        runner, network = runner_of(engine), drafter_of(engine).network
        assert isinstance(network, HeadNetwork)
        network.one_call = network.one_call if in_one_call else None
        engine.submit(list(range(40, 65)), SamplingParams(temperature=0.0, max_tokens=1))
        while engine.has_work:
            engine.step()
        layer = len(rounded.model.attention_layers)
        kept.append(torch.cat([runner.storage.keys[layer].flatten(1), runner.storage.values[layer].flatten(1)]).float())
    assert kept[0].abs().sum() > 10
    assert torch.allclose(*kept, atol=0.02 * float(kept[1].abs().max()))

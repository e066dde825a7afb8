"""Sampling with drafts: every token is distributed as it would be without them. Chi-square tests over fixed seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chairlift.core.randomness import uniform
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift.runner.base import ModelRunner
from chairlift.sampling.sampler import Sampler
from chairlift.sampling.token_masks import TokenMasks
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.draft_length import FixedLength
from chairlift.speculation.network_proposer import NetworkProposer
from chairlift.speculation.networks import FirstLayers
from tests.sampling import reference
from tests.speculation.running import run, start

VOCAB, RUNS, FIRST_SEED = 8, 3000, 10**6
PROMPT, OUTPUT = [1, 2, 2], [3, 3]
ALLOWED = [0, 1, 3, 4, 6]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "min_p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {0: 1.0, 5: -2.0}},
    "all": {"top_k": 6, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8, "frequency_penalty": 0.2},
}


def p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """That counts like these come from this distribution; tokens that should hardly come up are put together."""
    assert not counts[expected == 0].any(), "a token that must not come up did"
    often = expected * counts.sum() >= 5
    observed = np.append(counts[often], counts[~often].sum()).astype(float)
    wanted = np.append(expected[often], expected[~often].sum()) * counts.sum()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def expected(logits: torch.Tensor, params: SamplingParams, output: list[int], masked: bool) -> NDArray[np.float64]:
    row = logits.clone()
    if masked:
        row[[token for token in range(VOCAB) if token not in ALLOWED]] = -torch.inf
    return reference.probabilities(reference.edited(row, params, PROMPT, output, []), params)[0]


def sample_all(
    params: SamplingParams, logits: torch.Tensor, guesses: list[int], source: torch.Tensor | None, masked: bool
) -> list[list[int]]:
    """What many requests, each with a seed and a guess of its own, get from one step: one or two tokens each."""
    sampler, names = Sampler(VOCAB, torch.device("cpu")), [f"r{seed}" for seed in range(len(guesses))]
    for seed, name in enumerate(names, FIRST_SEED):
        sampler.add(name, params, PROMPT, seed=seed, eos_ids=[], output=OUTPUT)
    count = len(guesses)
    bits = np.array([[sum(1 << token for token in ALLOWED)]] * (2 * count), np.uint32)
    sampled = sampler.sample(
        logits.repeat(count, 1),
        names,
        [len(OUTPUT)] * count,
        TokenMasks(list(range(2 * count)), bits) if masked else None,
        [[guess] for guess in guesses],
        None if source is None else [source[None]] * count,
    )
    tokens = iter(sampled.tokens)
    return [[next(tokens) for _ in range(1 + accepted)] for accepted in sampled.accepted]


@pytest.mark.parametrize("drawn", [False, True], ids=["fixed guess", "drawn guess"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_distributed_as_without_drafts(case: str, masked: bool, drawn: bool) -> None:
    params = SamplingParams(**CASES[case])
    logits = reference.small_logits(2, VOCAB, seed=5) / 2
    source = (reference.small_logits(1, VOCAB, seed=9)[0] / 2).softmax(-1)  # quite another distribution
    sums = source.double().cumsum(0).numpy()
    places = [uniform(FIRST_SEED + index, len(OUTPUT), stream=1) for index in range(RUNS)]
    guesses = [min(int((sums <= place).sum()), VOCAB - 1) if drawn else 3 for place in places]
    first = np.zeros(VOCAB, np.int64)
    second = {guess: np.zeros(VOCAB, np.int64) for guess in range(VOCAB)}
    for guess, tokens in zip(
        guesses, sample_all(params, logits, guesses, source if drawn else None, masked), strict=True
    ):
        first[tokens[0]] += 1
        assert len(tokens) == 1 + (tokens[0] == guess)
        if len(tokens) == 2:
            second[guess][tokens[1]] += 1
    goal = expected(logits[0], params, OUTPUT, masked)
    assert p_value(first, goal) > 0.01
    for guess, counts in second.items():
        if counts.sum() > 100:
            assert p_value(counts, expected(logits[1], params, [*OUTPUT, guess], masked)) > 0.01
    kept = sum(int(counts.sum()) for counts in second.values()) / RUNS
    most = float(np.minimum(goal, source.numpy()).sum()) if drawn else float(goal[3])
    assert kept == pytest.approx(most, abs=0.04)  # as many as can be


def test_a_wrong_chance_would_be_noticed() -> None:
    counts = np.random.default_rng(0).multinomial(RUNS, [0.30, 0.20, 0.50])
    assert p_value(counts, np.array([0.30, 0.20, 0.50])) > 0.01
    assert p_value(counts, np.array([0.34, 0.20, 0.46])) < 0.01


@pytest.mark.parametrize("draws", [False, True])
def test_guesses_of_a_network_keep_the_distribution(tiny: LoadedModel, draws: bool) -> None:
    """Through the whole engine: the second token of many requests, guessed by the first layer of the model."""
    model = tiny.model
    assert isinstance(model, Decoder)
    words = dict.fromkeys((5, 60, 110, 170, 230), 100.0)
    params = SamplingParams(max_tokens=3, temperature=2.0, logit_bias=words, ignore_eos=True, detokenize=False)
    found = []
    for proposing in (False, True):
        engine = start(tiny, kv_memory="8MiB", seed=1 if proposing else 2)
        runner = engine.executor
        assert isinstance(runner, ModelRunner)
        if proposing:
            runner.drafter = NetworkProposer(
                "test", FirstLayers(model, 1), runner.attention, runner.storage, model, draws=draws
            )
            engine.scheduler.speculation = SpeculationController(runner.drafter, FixedLength(2))
        outcome = run(engine, [([7, 8, 9], params.clone(n=40)) for _ in range(4)])
        pairs = [tuple(one.tokens[1:]) for one in outcome.outcomes.values()]
        found.append(np.array([sum(pair[0] == token for pair in pairs) for token in words]))
        assert not proposing or outcome.proposed > 0
    share = (found[0] + found[1]) / (found[0] + found[1]).sum()
    # Both are samples: the difference of two has twice the variance of one against the truth.
    statistic = float((((found[0] - found[1]) ** 2) / np.maximum(2 * share * found[0].sum(), 1)).sum())
    assert float(torch.special.gammaincc(torch.tensor(2.0), torch.tensor(statistic / 2))) > 0.01

"""Sampling with drafts: every token is distributed as it would be without them. Chi-square tests over fixed seeds."""

from __future__ import annotations

from statistics import NormalDist
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chairlift.attention.batch import StepBatch
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.randomness import uniform
from chairlift.core.sampling.structure import Structure
from chairlift.engine.startup import LoadedModel
from chairlift.sampling import sampler as sampler_module
from chairlift.sampling.draw import TokenMasks
from chairlift.sampling.sampler import Sampler
from chairlift.speculation import draft_proposer
from chairlift.speculation.draft_models import FirstLayers
from chairlift_lab.training.trainable_head import WholeTextAttention
from tests.core.driving import make_request
from tests.sampling import reference
from tests.speculation.drafting import fixed_length, terms
from tests.speculation.running import decoder_of, proposer_with, run, runner_of, start

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
    """The p-value of a chi-square test of these counts; rare tokens are pooled."""
    assert not counts[expected == 0].any(), "a token of probability zero was sampled"
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
    params: SamplingParams, logits: torch.Tensor, drafts: list[int], source: torch.Tensor | None, masked: bool
) -> list[list[int]]:
    """The one or two tokens that each of many requests, with a seed and a draft of its own, gets from one step."""
    sampler, names = Sampler(VOCAB, torch.device("cpu")), [f"r{seed}" for seed in range(len(drafts))]
    for seed, name in enumerate(names, FIRST_SEED):
        sampler.add(name, params, PROMPT, seed=seed, eos_ids=[], output=OUTPUT)
    count = len(drafts)
    bits = np.array([[sum(1 << token for token in ALLOWED)]] * (2 * count), np.uint32)
    sampled = sampler.sample(
        logits.repeat(count, 1),
        names,
        [len(OUTPUT)] * count,
        TokenMasks(list(range(2 * count)), bits) if masked else None,
        [[draft] for draft in drafts],
        None if source is None else [source[None]] * count,
    )
    tokens = iter(sampled.tokens)
    return [[next(tokens) for _ in range(1 + accepted)] for accepted in sampled.accepted]


@pytest.mark.parametrize("sampled_draft", [False, True], ids=["fixed draft", "sampled draft"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_distributed_as_without_drafts(case: str, masked: bool, sampled_draft: bool) -> None:
    params = SamplingParams(**CASES[case])
    logits = reference.small_logits(2, VOCAB, seed=5) / 2
    source = (reference.small_logits(1, VOCAB, seed=9)[0] / 2).softmax(-1)  # another distribution
    sums = source.double().cumsum(0).numpy()
    places = [uniform(FIRST_SEED + index, len(OUTPUT), stream=1) for index in range(RUNS)]
    drafts = [min(int((sums <= place).sum()), VOCAB - 1) if sampled_draft else 3 for place in places]
    first = np.zeros(VOCAB, np.int64)
    second = {draft: np.zeros(VOCAB, np.int64) for draft in range(VOCAB)}
    for draft, tokens in zip(
        drafts, sample_all(params, logits, drafts, source if sampled_draft else None, masked), strict=True
    ):
        first[tokens[0]] += 1
        assert len(tokens) == 1 + (tokens[0] == draft)
        if len(tokens) == 2:
            second[draft][tokens[1]] += 1
    goal = expected(logits[0], params, OUTPUT, masked)
    assert p_value(first, goal) > 0.01
    for draft, counts in second.items():
        if counts.sum() > 100:
            assert p_value(counts, expected(logits[1], params, [*OUTPUT, draft], masked)) > 0.01
    kept = sum(int(counts.sum()) for counts in second.values()) / RUNS
    most = float(np.minimum(goal, source.numpy()).sum()) if sampled_draft else float(goal[3])
    assert kept == pytest.approx(most, abs=0.04)  # the most that any method can accept


def test_the_chi_square_test_detects_a_wrong_probability() -> None:
    counts = np.random.default_rng(0).multinomial(RUNS, [0.30, 0.20, 0.50])
    assert p_value(counts, np.array([0.30, 0.20, 0.50])) > 0.01
    assert p_value(counts, np.array([0.34, 0.20, 0.46])) < 0.01


REQUESTS, SHIFT, SIGNIFICANCE, POWER = 1500, 0.05, 0.01, 0.8


def probabilities_after(loaded: LoadedModel, contexts: list[list[int]], num_layers: int) -> torch.Tensor:
    """What follows each context by the first `num_layers` layers of the model [contexts, vocab]."""
    model = decoder_of(loaded).first_layers(num_layers)
    rows = []
    with torch.inference_mode():
        for context in contexts:
            tokens = torch.tensor(context)
            hidden = model.hidden_states(
                StepBatch(tokens, torch.arange(len(tokens))), WholeTextAttention(len(tokens))
            ).last
            rows.append(model.logits(hidden[-1:])[0].float().softmax(-1).double())
    return torch.stack(rows)


@pytest.mark.parametrize("sampled", [False, True], ids=["likeliest drafts", "sampled drafts"])
def test_drafts_of_a_model_keep_the_distribution_of_the_engine(tiny: LoadedModel, sampled: bool) -> None:
    """The second token of many requests, drafted by the model's first layer, against the model's own probabilities.

    Tokens that the draft model overrates are counted: there would be more of them if too many drafts were accepted.
    Over n requests, whose token is such a one with probability p_i, the count has the variance V = sum p_i (1 - p_i),
    and a two-sided test of significance a detects a shift d of the probabilities with the power
    Phi(d n / sqrt(V) - z(1 - a / 2)).
    """
    prompt = [7, 8, 9]
    params = SamplingParams(max_tokens=3, temperature=1.0, ignore_eos=True, detokenize=False)
    engine = start(tiny, kv_memory="16MiB", max_batch_requests=128, seed=1)
    proposer = proposer_with(engine, FirstLayers(decoder_of(tiny), 1), repeatable=not sampled)
    runner_of(engine).drafter = proposer
    engine.scheduler.speculation = fixed_length(proposer, 1)
    outcome = run(engine, [(prompt, params.clone(n=50)) for _ in range(REQUESTS // 50)])
    rejected = outcome.proposed - outcome.accepted
    assert outcome.proposed >= REQUESTS
    assert min(outcome.accepted, rejected) > (100 if sampled else 5)
    pairs = [one.tokens[:2] for one in outcome.outcomes.values()]
    firsts = sorted({first for first, _ in pairs})
    target, draft = (probabilities_after(tiny, [[*prompt, first] for first in firsts], layers) for layers in (2, 1))
    overrated = draft > target
    of_first = {first: index for index, first in enumerate(firsts)}
    expected_share = [float(target[of_first[first]][overrated[of_first[first]]].sum()) for first, _ in pairs]
    observed = sum(bool(overrated[of_first[first], second]) for first, second in pairs)
    deviation = sum(share * (1 - share) for share in expected_share) ** 0.5
    normal = NormalDist()
    critical = normal.inv_cdf(1 - SIGNIFICANCE / 2)
    assert normal.cdf(SHIFT * len(pairs) / deviation - critical) >= POWER
    assert abs(observed - sum(expected_share)) < critical * deviation
    if sampled:  # and a sampler that accepted every draft would be far outside
        accepting_all = sum(float(draft[of_first[first]][overrated[of_first[first]]].sum()) for first, _ in pairs)
        assert accepting_all - sum(expected_share) > 2 * critical * deviation


def test_a_draft_is_sampled_with_a_number_of_its_own_for_the_place_of_its_token(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a number that the sampler uses too, what follows a rejected draft would depend on the draft."""
    numbers: dict[object, set[tuple[int, int, int]]] = {}

    def note_numbers_of(module: ModuleType) -> None:
        used = numbers[module] = set()

        def noted(seed: int, position: int, stream: int = 0) -> float:
            used.add((stream, seed, position))
            return uniform(seed, position, stream=stream)

        monkeypatch.setattr(module, "uniform", noted)

    for module in (draft_proposer, sampler_module):
        note_numbers_of(module)
    engine = start(tiny, seed=1)
    proposer = proposer_with(engine, FirstLayers(decoder_of(tiny), 1))
    runner_of(engine).drafter = proposer
    engine.scheduler.speculation = fixed_length(proposer, 1)
    outcome = run(engine, [([7, 8, 9], SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True))] * 3)
    assert 0 < outcome.accepted < outcome.proposed
    drafted, sampled = numbers[draft_proposer], numbers[sampler_module]
    assert not drafted & sampled
    drawn = {number for number in sampled if number[0] == 0}
    verified = sampled - drawn
    assert {number[1:] for number in drafted} == {number[1:] for number in verified} <= {number[1:] for number in drawn}


@pytest.mark.parametrize(
    ("change", "sampled"),
    [
        ({}, True),
        ({"temperature": 0.0}, False),
        ({"seed": 3}, False),
        ({"structure": Structure.regex("a*")}, False),  # drafts that the grammar forbids are dropped, not rejected
    ],
)
def test_drafts_are_sampled_only_where_that_keeps_the_distribution(
    tiny: LoadedModel, change: dict[str, Any], sampled: bool
) -> None:
    proposer = proposer_with(start(tiny), FirstLayers(decoder_of(tiny), 1))
    request = make_request("a", [7, 8, 9], 9, params=SamplingParams(max_tokens=9, **change))
    (draft,) = proposer.propose([request], terms(2, [0, 1]))
    assert draft is not None
    assert len(draft.tokens) == 2
    source = proposer.sampled_from("a")
    assert (source is not None and len(source) == 2) == sampled

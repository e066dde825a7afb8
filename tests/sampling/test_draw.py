"""Filters and draws by themselves: against transformers, against statistics, and both implementations of top-p."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chairlift.core.sampling.params import MAX_SEED, SamplingParams
from chairlift.core.sampling.randomness import child_seed, uniform
from chairlift.sampling.draw import draw, filter_probabilities, filters_of
from chairlift.sampling.parameters import filters
from chairlift.sampling.sampler import Sampler
from tests.sampling import reference

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.8},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_filtered_probabilities_equal_transformers(fields: dict[str, float]) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    logits = torch.randn(16, 1000, generator=torch.Generator().manual_seed(1)) * 3

    scores = warpers.TemperatureLogitsWarper(float(params.temperature))(None, logits)
    if params.top_k:
        scores = warpers.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = warpers.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = warpers.MinPLogitsWarper(params.min_p)(None, scores)

    weights = (logits / params.temperature).softmax(-1)
    filter_probabilities(weights, [filters_of(params)] * 16)
    weights /= weights.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, scores.softmax(-1))
    assert ((weights > 0) == scores.isfinite()).all()


def test_repetition_penalty_equals_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    prompts = torch.randint(0, 50, (8, 20), generator=torch.Generator().manual_seed(2))
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(3))
    expected = processors.RepetitionPenaltyLogitsProcessor(1.4)(prompts, logits.clone()).argmax(-1)
    sampler = Sampler(50, CPU)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4)
    for i, prompt in enumerate(prompts.tolist()):
        sampler.add(str(i), params, prompt[:15], seed=0, eos_ids=[], output=prompt[15:])
    assert sampler.sample(logits, [str(i) for i in range(8)], [5] * 8).tokens == expected.tolist()


def test_tokens_that_tie_at_a_filter_stay_together() -> None:
    tied = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        weights = tied.clone()
        filter_probabilities(weights, [filters_of(params)])
        assert (weights > 0).all()


@pytest.mark.parametrize("vocab", [1, 2, 97, 512, 1000, 49152])
@pytest.mark.parametrize("number", [0.0, 1e-12, 0.5, 1 - 2**-53])
def test_only_tokens_with_weight_are_drawn(vocab: int, number: float) -> None:
    weights = torch.zeros(3, vocab)
    allowed = [vocab // 3, vocab // 2, vocab - 1]
    for row, token in enumerate(allowed):
        weights[row, token] = 0.1 + row
    assert draw(weights, [number] * 3).tolist() == allowed
    flat = torch.full((1, vocab), 1.0 / vocab)
    (token,) = draw(flat, [number]).tolist()
    assert token == pytest.approx(number * vocab, abs=1.01)


def test_rounding_never_leads_past_the_last_token_with_weight() -> None:
    weights = torch.rand(200, 512, generator=torch.Generator().manual_seed(6))
    weights[:, 300:] = 0
    tokens = draw(weights, [1 - 2**-53] * 200)
    assert (tokens == 299).all()


def chi_square(counts: Counter[int], expected: torch.Tensor, draws: int) -> float:
    return sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(expected.tolist()) if p)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=8, top_p=0.95)]
)
def test_drawn_frequencies_follow_the_probabilities(params: SamplingParams) -> None:
    """12 tokens, so at most 11 degrees of freedom: chi-square above 31.3 has a chance of one in a thousand."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4))
    expected = (logits / params.temperature).softmax(-1)[None]
    filter_probabilities(expected, [filters_of(params)])
    expected = expected[0] / expected.sum()
    draws, rows = 20_000, 100
    counts: Counter[int] = Counter()
    sampler = Sampler(12, CPU)
    names = [str(seed) for seed in range(rows)]
    for seed, name in enumerate(names):
        sampler.add(name, params, [], seed=seed, eos_ids=[])
    for position in range(draws // rows):
        counts.update(sampler.sample(logits.repeat(rows, 1), names, [position] * rows).tokens)
    assert set(counts) <= set(expected.nonzero()[:, 0].tolist())
    assert chi_square(counts, expected, draws) < 31.3


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 1.0, 4.0, 20.0]), vocab=st.integers(1, 3000))
def test_both_implementations_of_top_p_agree(seed: int, spread: float, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(5, vocab, generator=generator) * spread).softmax(-1)
    top_p = torch.tensor([[0.05], [0.5], [0.9], [0.99], [0.9999]], dtype=torch.float64)
    by_row = filters.nucleus_floor_by_row(weights, top_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "ROWS_SORTED_AT_ONCE", 2)
        batched = filters.nucleus_floor(weights, top_p)
    for row, floors in enumerate(zip(by_row[:, 0].tolist(), batched[:, 0].tolist(), strict=True)):
        kept = weights[row][weights[row] >= min(floors)].double()
        missing = float(top_p[row]) - float(kept.sum() - kept.min())
        assert floors[0] == floors[1] or abs(missing) < 1e-6  # rounding may decide at the boundary
        assert float(kept.sum()) >= float(top_p[row]) - 1e-6


def test_uniforms_are_evenly_distributed_and_distinct() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert chi_square(tenths, torch.full((10,), 0.1), len(numbers)) < 27.9  # 9 degrees, one in a thousand


def test_a_seed_gives_the_same_numbers_in_every_release() -> None:
    """Pinned to the first output of SplitMix64 from state 0."""
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert uniform(7, 0) == 0.5243459416779314


def test_each_completion_has_its_own_seed_and_the_first_keeps_the_requests() -> None:
    seeds = {child_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(seeds) == 50 * 128
    assert child_seed(123, 0) == 123
    assert child_seed(7, 1) == 3711672312747532216  # pinned like `uniform`
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_the_reference_agrees_on_a_large_vocabulary() -> None:
    logits = torch.randn(6, 50257, generator=torch.Generator().manual_seed(5)) * 3
    params = SamplingParams(temperature=0.9, top_k=300, top_p=0.9, min_p=0.001)
    sampler = Sampler(50257, CPU)
    for i in range(6):
        sampler.add(str(i), params, [], seed=i, eos_ids=[])
    tokens = sampler.sample(logits.clone(), [str(i) for i in range(6)], [3] * 6).tokens
    expected = [reference.token(row.double().numpy(), params, i, 3) for i, row in enumerate(logits)]
    assert all(want is None or got == want for got, want in zip(tokens, expected, strict=True))
    assert sum(want is not None for want in expected) >= 4


@pytest.mark.parametrize("floor", [filters.nucleus_floor_by_row, filters.nucleus_floor])
def test_a_set_that_holds_exactly_top_p_is_the_nucleus(floor: Callable[[Tensor, Tensor], Tensor]) -> None:
    weights = torch.tensor([[0.125, 0.5, 0.25, 0.125]])
    shares = [0.5, 0.5000001, 0.75, 0.8]
    found = [float(floor(weights, torch.tensor([[share]], dtype=torch.float64))) for share in shares]
    assert found == [0.5, 0.25, 0.25, 0.125]

"""Sampling with draft tokens: each row is sampled as if its drafts were output, and drafts are accepted or rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.randomness import uniform
from chairlift.core.sampling.structure import Structure
from chairlift.sampling.sampler import Sampler
from tests.sampling import reference

CPU = torch.device("cpu")
EOS, VOCAB, SEED = 3, 60, 11
PROMPT, OUTPUT, DRAFTS = [4, 5], [6], [7, 8, 7]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
        {"temperature": 1.0, "presence_penalty": 1.0, "top_p": 0.9},
        {"temperature": 0.0, "min_tokens": 3},
        {"temperature": 1.3},
    ],
)
def test_rows_after_drafts_are_sampled_as_if_the_drafts_were_output(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    rows = reference.small_logits(1 + len(DRAFTS), VOCAB, 7)
    rows[:, [EOS] if params.min_tokens else [7, 8]] = rows.max() + 0.5  # likely, unless the drafts count
    expected = []
    for index, row in enumerate(rows):
        output = [*OUTPUT, *DRAFTS[:index]]
        edited = reference.edited(row, params, PROMPT, output, [EOS])
        expected.append(reference.token(edited, params, SEED, len(output)))
    assert None not in expected
    # Each row's token is seen if the drafts before it are accepted, so draft what the rows before it sample.
    for index in range(len(rows)):
        sampler = Sampler(VOCAB, CPU)
        sampler.add("r", params, PROMPT, seed=SEED, eos_ids=[EOS], output=OUTPUT)
        logits = rows[: index + 1].clone()
        for before, draft in enumerate(DRAFTS[:index]):
            logits[before] = -100.0
            logits[before, draft] = 100.0  # so likely that the draft is accepted
        sampled = sampler.sample(logits, ["r"], [len(OUTPUT)], None, [DRAFTS[:index]])
        assert sampled.tokens == [*DRAFTS[:index], expected[index]]
        assert sampled.accepted == [index]


def test_tokens_after_a_rejected_draft_are_dropped() -> None:
    logits = torch.eye(8)[[1, 2, 4, 5, 6, 1, 7]]
    sampler = Sampler(8, CPU)
    for name in "abc":
        sampler.add(name, SamplingParams(temperature=0.0), [0], seed=0, eos_ids=[])
    sampled = sampler.sample(logits, [*"abc"], [0, 0, 0], None, [[1, 3], [], [6, 1]])
    assert sampled.tokens == [1, 2, 5, 6, 1, 7]
    assert sampled.accepted == [1, 0, 2]


def test_penalties_count_only_tokens_that_were_kept() -> None:
    sampler = Sampler(6, CPU)
    sampler.add("r", SamplingParams(temperature=0.0, presence_penalty=2.0), [], seed=0, eos_ids=[])
    first = sampler.sample(torch.eye(6)[[1, 2, 4]] * 3, ["r"], [0], None, [[1, 3]])
    assert (first.tokens, first.accepted) == ([1, 2], [1])
    # 4 was sampled after a rejected draft, so it has no penalty; 2 was kept and has one.
    logits = torch.tensor([[0.0, 0.0, 3.0, 0.0, 1.5, 0.0]])
    assert sampler.sample(logits, ["r"], [2]).tokens == [4]


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_draft_is_accepted_or_replaced_as_in_speculative_sampling(seed: int) -> None:
    target, drafted_from, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2]), 1
    sampler = Sampler(3, CPU)
    sampler.add("r", SamplingParams(), [], seed=seed, eos_ids=[])
    logits = target.log().repeat(2, 1)
    sampled = sampler.sample(logits, ["r"], [4], None, [[draft]], [drafted_from[None]])
    accepted = uniform(seed, 4, stream=2) * 0.6 < 0.3
    assert sampled.accepted == [int(accepted)]
    assert sampled.tokens[0] == (draft if accepted else 0), "only token 0 is more likely than its draft probability"


def test_the_acceptance_rate_is_the_overlap_of_the_two_distributions() -> None:
    """min(0.2, 0.8) / 0.8 = 25 %, so of 400 seeds about 100: with a standard deviation of 8.7, 65 to 135."""
    target, drafted_from = torch.tensor([0.8, 0.2]), torch.tensor([0.2, 0.8])
    accepted = 0
    for seed in range(400):
        sampler = Sampler(2, CPU)
        sampler.add("r", SamplingParams(), [], seed=seed, eos_ids=[])
        accepted += sampler.sample(target.log().repeat(2, 1), ["r"], [0], None, [[1]], [drafted_from[None]]).accepted[0]
    assert 65 <= accepted <= 135


def test_min_tokens_of_a_structured_request_is_left_to_its_mask() -> None:
    """The mask allows an end where the grammar allows nothing else, which a ban would make impossible."""
    sampler = Sampler(5, CPU)
    params = SamplingParams(temperature=0.0, min_tokens=4, structure=Structure.regex("a"))
    sampler.add("r", params, [0], seed=0, eos_ids=[EOS])
    assert sampler.sample(torch.eye(5)[[EOS]], ["r"], [1]).tokens == [EOS]


def test_a_seeded_request_draws_the_same_tokens_with_and_without_drafts() -> None:
    rows = reference.small_logits(6, VOCAB, 5) / 4
    sampler = Sampler(VOCAB, CPU)
    for name in ("plain", "drafted"):
        sampler.add(name, SamplingParams(), PROMPT, seed=SEED, eos_ids=[EOS])
    plain = [sampler.sample(row[None].clone(), ["plain"], [index]).tokens[0] for index, row in enumerate(rows)]
    sampled = sampler.sample(rows.clone(), ["drafted"], [0], None, [plain[:-1]])
    assert sampled.tokens == plain
    assert sampled.accepted == [5]
    assert len({*plain}) > 3

"""The sampler as the runners use it: edits, greedy rows, logprobs, batches and invalid rows."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.request import Request, RequestLimits
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.sampling import sampler as sampler_module
from chairlift.sampling.draw import draw
from chairlift.sampling.sampler import SampledBatch, Sampler
from tests.sampling import reference

CPU = torch.device("cpu")
EOS = 3
NAN, INF = math.nan, math.inf


def sample_one(
    logits: list[float] | torch.Tensor,
    params: SamplingParams,
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 0,
) -> SampledBatch:
    row = torch.as_tensor(logits, dtype=torch.float32).clone()
    sampler = Sampler(len(row), CPU)
    sampler.add("r", params, prompt or [], seed=seed, eos_ids=[EOS], output=output or [])
    return sampler.sample(row[None], ["r"], [len(output or [])])


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def test_greedy_takes_the_lowest_id_of_the_most_likely_tokens() -> None:
    assert sample_one([0.0, 5.0, 5.0, 1.0], greedy()).tokens == [1]


def test_one_by_one_draws_each_row_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a sum depends on the number of rows and on the alignment of their memory."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(sampler_module, "draw", lambda weights, chances: seen.append(weights) or draw(weights, chances))
    logits = torch.randn(4, 7)
    params = [SamplingParams(temperature=t, top_p=0.9, logprobs=2, seed=3) for t in (1.0, 0.0, 0.7, 1.3)]
    found = []
    for one_by_one in (False, True):
        sampler = Sampler(7, CPU, one_by_one=one_by_one)
        for name, one in zip("abcd", params, strict=True):
            sampler.add(name, one, [], seed=3, eos_ids=[])
        found.append(sampler.sample(logits.clone(), [*"abcd"], [0] * 4))
    assert found[0] == found[1]
    assert [len(weights) for weights in seen] == [3, 1, 1, 1]
    assert all(weights.storage_offset() == 0 for weights in seen)


def test_almost_zero_temperature_is_greedy_and_does_not_overflow() -> None:
    assert sample_one([30.0, 29.0, -80.0], SamplingParams(temperature=1e-40)).tokens == [0]


def test_a_step_may_sample_nothing() -> None:
    assert Sampler(5, CPU).sample(torch.empty(0, 5), [], []) == SampledBatch([], [])


def test_logit_bias_changes_the_choice() -> None:
    assert sample_one([0.0, 5.0, 4.0], greedy(logit_bias={2: 1.5, 1: -0.2})).tokens == [2]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, EOS),
        ({"min_tokens": 2}, 1),
        ({"min_tokens": 2, "stop_token_ids": [1]}, 0),
        ({"min_tokens": 2, "ignore_eos": True}, EOS),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [EOS]}, 1),
    ],
)
def test_min_tokens_bans_tokens_that_end_the_output(fields: dict[str, Any], expected: int) -> None:
    logits = [2.0, 3.0, 1.0, 9.0]
    assert sample_one(logits, greedy(**fields), output=[0]).tokens == [expected]
    assert sample_one(logits, greedy(**fields), output=[0, 0]).tokens == [EOS]


def test_repetition_penalty_applies_to_prompt_and_output_and_to_both_signs() -> None:
    params = greedy(repetition_penalty=2.0)
    assert sample_one([4.0, 3.0, 2.5], params, prompt=[0], output=[1]).tokens == [2]
    assert sample_one([-1.0, -1.5, -9.0], params, prompt=[0, 0]).tokens == [1]


def test_frequency_penalty_counts_presence_penalty_does_not_and_both_ignore_the_prompt() -> None:
    logits = [3.0, 2.0, 0.5]
    assert sample_one(logits, greedy(frequency_penalty=0.5), prompt=[0] * 9).tokens == [0]
    assert sample_one(logits, greedy(frequency_penalty=0.5), output=[0, 0]).tokens == [0]
    assert sample_one(logits, greedy(frequency_penalty=0.5), output=[0, 0, 0]).tokens == [1]
    assert sample_one(logits, greedy(presence_penalty=0.9), output=[0] * 50).tokens == [0]
    assert sample_one(logits, greedy(presence_penalty=1.1), output=[0]).tokens == [1]


def test_penalties_count_the_sampled_tokens() -> None:
    sampler = Sampler(3, CPU)
    sampler.add("r", greedy(frequency_penalty=1.0), [2], seed=0, eos_ids=[])
    tokens = [sampler.sample(torch.tensor([[3.0, 2.5, 0.9]]), ["r"], [i]).tokens[0] for i in range(6)]
    assert tokens == [0, 1, 0, 1, 0, 2]


def test_a_request_that_has_generated_before_is_penalised_for_it() -> None:
    """A request enters the sampler after its first tokens if it was preempted, or if it needs the host only later."""
    request = Request("r", [1], greedy(presence_penalty=2.0), max_new_tokens=9, arrival=0.0)
    request.append(2)
    sampler = Sampler(4, CPU)
    sampler.follow(request)
    assert sampler.sample(torch.tensor([[0.0, 1.0, 3.0, 2.0]]), ["r"], [1]).tokens == [3]


def test_logprobs_are_those_of_the_unedited_logits() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    expected = logits.log_softmax(-1)
    params = greedy(logprobs=3, logit_bias={3: 50.0}, repetition_penalty=1.5)
    (entry,) = sample_one(logits, params, prompt=[1, 2]).logprobs
    assert entry is not None
    assert (entry.token_id, entry.rank) == (3, 4)
    assert entry.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in entry.top] == [1, 2, 0]
    assert [value for _, value in entry.top] == pytest.approx(expected[[1, 2, 0]].tolist())


def test_tied_logprobs_are_listed_by_id_and_share_a_rank() -> None:
    logits = torch.zeros(40)
    logits[[30, 7, 21]] = 2.0
    logits[11] = 5.0
    (entry,) = sample_one(logits, greedy(logprobs=3, logit_bias={21: 90.0})).logprobs
    assert entry is not None
    assert (entry.token_id, entry.rank) == (21, 2)
    assert [token for token, _ in entry.top] == [11, 7, 21]
    (entry,) = sample_one(torch.zeros(40), greedy(logprobs=20)).logprobs
    assert entry is not None
    assert [token for token, _ in entry.top] == list(range(20))


def test_each_row_gets_its_own_number_of_logprobs() -> None:
    sampler = Sampler(4, CPU)
    counts = {"none": None, "zero": 0, "two": 2, "more than there are": 20}
    for name, count in counts.items():
        sampler.add(name, greedy(logprobs=count), [], seed=0, eos_ids=[])
    batch = sampler.sample(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(4, 1), list(counts), [0] * 4)
    counts = [None if entry is None else len(entry.top) for entry in batch.logprobs]
    assert counts == [None, 0, 2, 4]
    assert all(entry.rank == 1 for entry in batch.logprobs if entry)


@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0, 0.0], [-INF] * 4, [INF, 1.0, 2.0, 0.0]])
@pytest.mark.parametrize(
    "params",
    [greedy(logprobs=2), greedy(repetition_penalty=1.2), SamplingParams(top_k=2, top_p=0.9, logprobs=1)],
)
def test_an_invalid_row_is_flagged_and_does_not_affect_others(bad: list[float], params: SamplingParams) -> None:
    good = [0.0, 1.0, 8.0, 3.0]
    alone = sample_one(good, params, prompt=[1], seed=5)
    sampler = Sampler(4, CPU)
    for name in "abc":
        sampler.add(name, params, [1], seed=5, eos_ids=[])
    batch = sampler.sample(torch.tensor([good, bad, good]), ["a", "b", "c"], [0, 0, 0])
    assert batch.tokens == [alone.tokens[0], -1, alone.tokens[0]]
    assert batch.logprobs == [alone.logprobs[0], None, alone.logprobs[0]]


def test_a_row_with_every_token_banned_is_flagged() -> None:
    params = greedy(min_tokens=1, stop_token_ids=[0, 1])
    assert sample_one([1.0, 2.0], params).tokens == [-1]


def test_token_ids_beyond_the_vocabulary_are_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match="logit_bias: token id 100 is outside the vocabulary of 100"):
        RequestLimits(100, 8).check_params(SamplingParams(logit_bias={100: 1.0}))
    with pytest.raises(InvalidParameter, match="stop_token_ids"):
        RequestLimits(100, 8).check_params(SamplingParams(stop_token_ids=[5, 100]))
    with pytest.raises(InvalidParameter, match="prompt"):
        sample_one([0.0, 0.0], greedy(repetition_penalty=2.0), prompt=[2])


def test_a_request_is_added_once_and_removed_completely() -> None:
    sampler = Sampler(2, CPU)
    sampler.add("r", greedy(presence_penalty=2.0), [], seed=0, eos_ids=[], output=[0])
    with pytest.raises(InvalidParameter, match="request_id"):
        sampler.add("r", greedy(), [], seed=0, eos_ids=[])
    sampler.forget("r")
    sampler.add("r", greedy(presence_penalty=2.0), [], seed=0, eos_ids=[])
    assert sampler.sample(torch.tensor([[1.0, 0.0]]), ["r"], [0]).tokens == [0]


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 10, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.31, 1e-6]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 59), st.integers(-9, 9).map(float), max_size=4),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, 59), max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 4),
)
ids = st.lists(st.integers(0, 59), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(any_params, ids, ids, st.integers(0, 2**63 - 1)), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_any_mix_of_requests_matches_the_reference(
    rows: list[tuple[SamplingParams, list[int], list[int], int]], seed: int
) -> None:
    logits = reference.small_logits(len(rows), 60, seed)
    sampler = Sampler(60, CPU)
    for i, (params, prompt, output, row_seed) in enumerate(rows):
        sampler.add(str(i), params, prompt, seed=row_seed, eos_ids=[EOS], output=output)
    names, lengths = [str(i) for i in range(len(rows))], [len(row[2]) for row in rows]
    batch = sampler.sample(logits.clone(), names, lengths)
    for i, (params, prompt, output, row_seed) in enumerate(rows):
        row = reference.edited(logits[i], params, prompt, output, [EOS])
        expected = reference.token(row, params, row_seed, len(output))
        assert expected is None or batch.tokens[i] == expected
        entry = batch.logprobs[i]
        assert (entry is None) == (params.logprobs is None)
        if entry is not None:
            plain = logits[i].log_softmax(-1)
            by_rank = sorted(range(60), key=lambda t: (-float(logits[i][t]), t))[: params.logprobs]
            assert entry.logprob == pytest.approx(float(plain[batch.tokens[i]]), abs=1e-5)
            assert entry.rank == 1 + int((logits[i] > logits[i][batch.tokens[i]]).sum())
            assert [token for token, _ in entry.top] == by_rank


def varied_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 5, 50]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        min_tokens=rng.choice([0, 8]),
        logit_bias=rng.choice([None, {3: 4.0, 9: -100.0}]),
        logprobs=rng.choice([None, 3]),
    )


def generate(sampler: Sampler, name: str, logits: torch.Tensor, others: list[str]) -> list[int]:
    """One token per row of logits [steps, V] for a request, in the middle of a batch of others."""
    noise = reference.small_logits(len(others), logits.shape[1], 99)
    middle = len(others) // 2
    names = [*others[:middle], name, *others[middle:]]
    tokens = []
    for step, row in enumerate(logits):
        batch = torch.cat([noise[:middle], row[None], noise[middle:]])
        tokens.append(sampler.sample(batch, names, [step] * len(names)).tokens[middle])
    return tokens


@pytest.mark.parametrize("case", range(8))
def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_after_preemption(case: int) -> None:
    rng = random.Random(case)
    vocab, steps, prompt = 1013, 12, [5, 6, 7, 7]
    logits = torch.randn(steps, vocab, generator=torch.Generator().manual_seed(case)) * 2
    params = varied_params(rng).clone(temperature=1.0)

    sampler = Sampler(vocab, CPU)
    sampler.add("r", params, prompt, seed=case, eos_ids=[EOS])
    alone = generate(sampler, "r", logits, [])

    sampler.forget("r")
    others = [f"other {i}" for i in range(31)]
    for i, other in enumerate(others):
        sampler.add(other, varied_params(rng), [1, 2, 3], seed=i, eos_ids=[EOS])
    sampler.add("r", params, prompt, seed=case, eos_ids=[EOS])
    assert generate(sampler, "r", logits, others) == alone

    sampler.add("back", params, prompt, seed=case, eos_ids=[EOS], output=alone[:5])
    resumed = [sampler.sample(logits[i : i + 1].clone(), ["back"], [i]).tokens[0] for i in range(5, steps)]
    assert resumed == alone[5:]
    assert len(set(alone)) > 1

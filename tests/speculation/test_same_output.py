"""Whatever is drafted, every request gets the tokens that it gets without drafts, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.engine.startup import LoadedModel
from chairlift.errors import InvalidParameter
from tests.speculation.running import (
    GREEDY,
    SETTINGS,
    assert_same_output,
    often_right,
    run,
    run_with_pauses,
    start,
    uneven_work,
)


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_are_the_same(tiny: LoadedModel, setting: str) -> None:
    options, work = SETTINGS[setting], uneven_work(12)
    plain = run(start(tiny, **options), work, arrive=run_with_pauses)
    fast = run(start(tiny, often_right(plain), **options), work, arrive=run_with_pauses)
    assert_same_output(plain, fast)
    assert fast.accepted > 10
    assert fast.proposed > fast.accepted
    assert (fast.preemptions > 0) == (setting in ("preempted", "swapped"))


@pytest.mark.parametrize("count", [1, 5, 32])
def test_ngram_drafts_change_nothing_at_any_batch_size(tiny: LoadedModel, count: int) -> None:
    few_words = dict.fromkeys(range(5, 9), 100.0)
    work = [(prompt, GREEDY.clone(max_tokens=32, logit_bias=few_words)) for prompt, _ in uneven_work(count)]
    plain = run(start(tiny, kv_memory="8MiB"), work)
    fast = run(start(tiny, kv_memory="8MiB", speculate="ngram", draft_length=15 if count == 5 else 4), work)
    assert_same_output(plain, fast)
    assert fast.accepted > count  # with four tokens to choose from, the text repeats itself
    assert fast.steps < plain.steps


SAMPLED = SamplingParams(temperature=0.8, max_tokens=30, seed=11, ignore_eos=True)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logit_bias": {5: 3.0, 6: -100.0}, "min_tokens": 12, "ignore_eos": False},
        {"n": 3, "seed": None},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"stop_token_ids": list(range(3, 40)), "min_tokens": 3},
        {"stop": ["e", "t"], "include_stop_str_in_output": True},
    ],
    ids=lambda change: "+".join(change) or "temperature",
)
def test_sampled_tokens_are_the_same(tiny: LoadedModel, change: dict[str, Any]) -> None:
    """Draws depend on the seed and the position of the token alone, so they do not change either."""
    prompts = [prompt for prompt, _ in uneven_work(6)]
    seeds = [None if "seed" in change else i for i in range(6)]
    work = [(prompt, SAMPLED.clone(**change | {"seed": seed})) for prompt, seed in zip(prompts, seeds, strict=True)]
    plain = run(start(tiny), work)
    fast = run(start(tiny, often_right(plain)), work)
    assert_same_output(plain, fast)
    assert fast.accepted > 0


def test_a_stop_token_among_accepted_drafts_ends_the_request(tiny: LoadedModel) -> None:
    work = [([5, 6, 7, 8, 9], GREEDY)]
    plain = run(start(tiny), work)
    tokens = next(iter(plain.outcomes.values())).tokens
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    stopping = [(prompt, params.clone(stop_token_ids=[stop])) for prompt, params in work]
    engine = start(tiny, often_right(plain, seed=2), length=7)
    fast = run(engine, stopping)
    (outcome,) = fast.outcomes.values()
    assert outcome.tokens == tokens[: tokens.index(stop) + 1]
    assert outcome.ending is not None
    assert outcome.ending.detail == stop


def test_logprobs_are_those_of_the_sampled_tokens(tiny: LoadedModel) -> None:
    work = uneven_work(5, GREEDY.clone(logprobs=3))
    plain = run(start(tiny), work)
    fast = run(start(tiny, often_right(plain)), work)
    assert_same_output(plain, fast)
    for name, outcome in plain.outcomes.items():
        for one, other in zip(outcome.logprobs, fast.outcomes[name].logprobs, strict=True):
            assert one is not None
            assert other is not None
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "maximum": 9999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "top_p": 0.9}, {"min_tokens": 9}]
)
def test_structured_requests_are_verified_under_their_grammar(tiny: LoadedModel, change: dict[str, Any]) -> None:
    structures = [Structure.json(SCHEMA), Structure.regex(r"[0-9]{3}-[a-f]{2,9}"), Structure.choice(["red", "reddish"])]
    params = [SamplingParams(structure=one, max_tokens=40, **change) for one in (*structures, None)]
    work = [([70, 71, 72 + i], one) for i, one in enumerate(params)]
    plain = run(start(tiny), work)
    fast = run(start(tiny, often_right(plain, seed=4)), work)
    assert_same_output(plain, fast)
    assert fast.accepted > 5


def test_the_offline_api_accepts_speculate(folder: Path) -> None:
    plain, fast = (
        LLM(str(folder), device="cpu", kv_memory="2MiB", progress=False, **options)
        for options in ({}, {"speculate": "ngram"})
    )
    prompts = ["a chairlift never stops for boarding. a chairlift never stops for", "many sequences"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, fast))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"speculate": "bigram"}, "speculate"),
        ({"speculate": "ngram:3"}, "speculate"),
        ({"speculate": "layers:0"}, "speculate"),
        ({"speculate": "layers:x"}, "speculate"),
        ({"speculate": "draft:"}, "speculate"),
        ({"speculate": 3}, "speculate"),
        ({"speculate": "ngram", "draft_length": 0}, "draft_length"),
        ({"speculate": "ngram", "draft_length": 16}, "draft_length"),
        ({"speculate": "layers:1", "draft_length": 8}, "draft_length"),
        ({"draft_length": 3}, "draft_length"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        EngineConfig(device="cpu", **options)
    assert refusal.value.parameter == parameter

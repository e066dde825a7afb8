"""Beam search against transformers' `generate(num_beams=…)`: the same sequences with the same scores, in float32."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.events import DraftsVerified
from chairlift.outputs import RequestOutput
from tests.tiny import write_tiny_checkpoint

PAD = 1
STOPS = [2, 3, 40, 76, 107, 212, 285, 304]  # 2 is the EOS of the model; many stop tokens make beams end early and often
RULES = list(itertools.product([-1.0, 0.0, 1.0, 2.0], [True, False, "never"]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("beams"), positions=2048)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), dtype="float32", progress=False, max_batch_requests=64, block_size=4)


def expected(
    model: Any, prompts: list[list[int]], params: SamplingParams, **more: Any
) -> list[list[tuple[Any, float]]]:
    """The (tokens, score) that transformers finds for each of the prompts, which have the same length."""
    found = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0])),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        pad_token_id=PAD,
        **{"do_sample": False, "return_dict_in_generate": True, "output_scores": True, **more},
    )
    texts = [row.tolist() for row in found.sequences[:, len(prompts[0]) :]]
    pairs = list(zip(texts, found.sequences_scores.tolist(), strict=True))
    return [pairs[start : start + params.n] for start in range(0, len(pairs), params.n)]


def check(result: RequestOutput, wanted: list[tuple[list[int], float]]) -> None:
    assert len(result.outputs) == len(wanted)
    for output, (tokens, score) in zip(result.outputs, wanted, strict=True):
        length = len(output.token_ids)
        assert output.token_ids == tokens[:length]
        assert set(tokens[length:]) <= {PAD}
        assert output.score == pytest.approx(score, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_sequences_and_scores(width: int, llm: LLM, reference: Any) -> None:
    """Two prompts for each of twelve rules: all searches and a plain request in one batch."""
    rng = random.Random(width)
    pairs = [[[rng.randrange(4, 320) for _ in range(length)] for _ in range(2)] for length in range(1, 13)]
    rules = [
        SamplingParams(
            beam_width=width,
            n=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=9,
            stop_token_ids=STOPS[1:],
        )
        for length_penalty, early_stopping in RULES
    ]
    plain = SamplingParams(temperature=0, max_tokens=9)
    prompts = [prompt for pair in pairs for prompt in pair]
    alone = llm.generate([[5, 6, 7]], plain, use_tqdm=False)[0]
    results = llm.generate([*prompts, [5, 6, 7]], [*(rule for rule in rules for _ in range(2)), plain], use_tqdm=False)
    assert results.pop().outputs[0].token_ids == alone.outputs[0].token_ids
    for pair, rule, number in zip(pairs, rules, itertools.count(), strict=False):
        for index, wanted in enumerate(expected(reference, pair, rule, eos_token_id=STOPS)):
            check(results[2 * number + index], wanted)
    reasons = {output.finish_reason for result in results for output in result.outputs}
    assert reasons == {"stop", "length"}
    assert llm.engine.scheduler.kv.num_free == llm.engine.scheduler.kv.num_blocks


@pytest.mark.parametrize(
    "options", [{"max_batch_tokens": 3, "max_batch_requests": 3}, {"kv_memory": "34 KiB", "max_batch_requests": 9}]
)
def test_a_small_budget_or_memory_changes_nothing(options: dict[str, Any], checkpoint: Path, reference: Any) -> None:
    """Prompts in chunks, beams that do not all fit in one step, searches that are preempted."""
    llm = LLM(str(checkpoint), dtype="float32", progress=False, block_size=4, max_model_len=40, **options)
    params = SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True)
    prompts = [[7 + number] * 6 + [3, 9, 11, 13 + number] for number in range(4)]
    results = llm.generate(prompts, params, use_tqdm=False)
    for result, wanted in zip(results, expected(reference, prompts, params, eos_token_id=None), strict=True):
        check(result, wanted)
    preempted = any(result.metrics.preemptions for result in results)
    assert preempted == ("kv_memory" in options)


def test_min_tokens_logprobs_and_text(llm: LLM, reference: Any) -> None:
    params = SamplingParams(beam_width=4, n=2, max_tokens=8, min_tokens=5, logprobs=3, stop_token_ids=STOPS[1:])
    prompt = [8, 9, 10, 30, 200]
    result = llm.generate([prompt], params, use_tqdm=False)[0]
    check(result, expected(reference, [prompt], params, eos_token_id=STOPS, min_new_tokens=5)[0])
    for output in result.outputs:
        assert len(output.token_ids) >= 6
        assert output.logprobs is not None
        chosen = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        total = sum(one.logprob for one in chosen)
        assert output.cumulative_logprob == pytest.approx(total)
        assert output.score == pytest.approx(total / len(output.token_ids))
        logits = reference(torch.tensor([[*prompt, *output.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        for one, entry, token, row in zip(chosen, output.logprobs, output.token_ids, logits, strict=True):
            assert one.logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-4)
            assert one.rank == 1 + int((row > row[token]).sum())
            assert set(entry) == {token, *row.topk(3).indices.tolist()}
        ends = output.finish_reason == "stop"
        assert output.text == llm.get_tokenizer().decode(output.token_ids[:-1] if ends else output.token_ids)


def test_beam_search_with_speculation_and_a_prefix_hit(checkpoint: Path, reference: Any) -> None:
    """Other requests have drafts, so that steps have more rows than chunks; beams have a prefix hit."""
    llm = LLM(str(checkpoint), dtype="float32", progress=False, block_size=4, speculate="ngram", draft_length=3)
    search = SamplingParams(beam_width=4, n=4, max_tokens=10, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={5: 100.0})  # repeats itself
    prompts = [[5, 6, 7] * 6, [8, 9, 10, 30, 200, 11], [5, 6, 7] * 5, [12, 13, 14, 15, 16, 17]]
    wanted = expected(reference, [prompts[1], prompts[3]], search, eos_token_id=None)
    drafted = []
    llm.engine.subscribe(lambda events: drafted.extend(event for event in events if isinstance(event, DraftsVerified)))
    for hits in (0, 4):
        results = llm.generate(prompts, [plain, search, plain, search], use_tqdm=False)
        check(results[1], wanted[0])
        check(results[3], wanted[1])
        assert results[1].cached_tokens == results[3].cached_tokens == hits
    assert drafted
    assert {event.request_id for event in drafted} <= {result.request_id for result in results[::2]} | {
        "request-0",
        "request-2",
    }


def test_memory_of_eight_beams_on_a_long_prompt(checkpoint: Path) -> None:
    """Beams share the prompt and their common tokens after it."""
    peaks = {}
    for width in (1, 8):
        llm = LLM(str(checkpoint), dtype="float32", progress=False)
        used = [0]
        llm.engine.subscribe(lambda _, used=used, llm=llm: used.append(llm.engine.scheduler.kv.pool.num_used))
        rng = random.Random(0)
        prompt = [rng.randrange(4, 320) for _ in range(1000)]
        search = {"beam_width": width} if width > 1 else {"temperature": 0}
        llm.generate([prompt], SamplingParams(max_tokens=48, ignore_eos=True, **search), use_tqdm=False)
        peaks[width] = max(used)
    assert peaks[1] == 66  # 1000 + 47 tokens in blocks of 16
    assert peaks[8] < 1.5 * peaks[1]

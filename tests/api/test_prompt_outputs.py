"""Prompt log-probabilities, embeddings and scores equal those of transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.core.events import Event, PromptPooled, PromptScored, RequestPreempted, StepDone
from chairlift.core.integrity import check_quiescent
from chairlift.core.orderings.base import PriorityOrdering
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.loading.tokenizer import add_special_tokens
from chairlift.outputs import Logprob
from tests.api.prompt_outputs import SCORED, check_embedding, expected_embedding, expected_logprobs, pooled
from tests.extending.toys import echo_executor
from tests.tiny import SENTENCES, byte_level_tokenizer, write_tiny_checkpoint

PROMPT_ONLY = SamplingParams(max_tokens=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """Prompts of these tests take several steps."""
    return LLM(str(folder), kv_memory="4MiB", seed=0, max_batch_tokens=16, max_batch_requests=4)


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def check_quiescent_afterwards(llm: LLM) -> Any:
    yield
    llm.engine.step()
    check_quiescent(llm.engine.scheduler)


def check_logprobs(hf: Any, tokens: list[int], found: list[dict[int, Logprob] | None] | None, top: int) -> None:
    assert found is not None
    assert len(found) == len(tokens)
    assert found[0] is None
    expected = expected_logprobs(hf, tokens)
    for position, entry in enumerate(found[1:], start=1):
        assert entry is not None
        row, own = expected[position - 1], tokens[position]
        assert abs(entry[own].logprob - float(row[own])) < 1e-3
        assert entry[own].rank == 1 + int((row > row[own]).sum())
        likeliest = row.topk(top).indices.tolist()
        assert set(entry) == {own, *likeliest}
        assert all(abs(entry[token].logprob - float(row[token])) < 1e-3 for token in likeliest)


def test_prompt_logprobs_in_chunks_beside_decodes_with_several_requests(llm: LLM, hf: Any) -> None:
    steps: list[StepDone] = []
    llm.engine.subscribe(lambda events: steps.extend(event for event in events if isinstance(event, StepDone)))
    decoding = llm.stream("a", SCORED.clone(max_tokens=60, prompt_logprobs=None))
    next(decoding)
    results = llm.generate([*SENTENCES, "b"], SCORED, use_tqdm=False)
    decoding.close()  # type: ignore[attr-defined]
    assert sum(step.decode_tokens > 0 and step.prefill_tokens > 0 for step in steps) > 3
    assert max(len(result.prompt_token_ids) for result in results) > 24, "the longest prompt takes several steps"
    plain = llm.generate([*SENTENCES, "b"], SCORED.clone(prompt_logprobs=None), use_tqdm=False)
    for result, unscored in zip(results, plain, strict=True):
        check_logprobs(hf, result.prompt_token_ids, result.prompt_logprobs, 4)
        assert result.outputs[0].token_ids == unscored.outputs[0].token_ids
        assert unscored.prompt_logprobs is None


def test_a_prompt_that_is_scored_is_not_taken_from_the_prefix_cache(llm: LLM, hf: Any) -> None:
    prompt = SENTENCES[0] + SENTENCES[1]
    llm.generate(prompt, SCORED.clone(prompt_logprobs=None), use_tqdm=False)
    (scored,) = llm.generate(prompt, SCORED, use_tqdm=False)
    assert scored.cached_tokens == 0
    check_logprobs(hf, scored.prompt_token_ids, scored.prompt_logprobs, 4)
    (again,) = llm.generate(prompt, SCORED.clone(prompt_logprobs=None), use_tqdm=False)
    assert again.cached_tokens >= 16


def test_only_the_prompt_is_computed_with_max_tokens_0(llm: LLM, hf: Any) -> None:
    results = llm.generate([SENTENCES[2], "b"], PROMPT_ONLY, use_tqdm=False)
    for result in results:
        check_logprobs(hf, result.prompt_token_ids, result.prompt_logprobs, 0)
        (output,) = result.outputs
        assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    (several,) = llm.generate(SENTENCES[3], PROMPT_ONLY.clone(n=2), use_tqdm=False)
    check_logprobs(hf, several.prompt_token_ids, several.prompt_logprobs, 0)
    assert [output.finish_reason for output in several.outputs] == ["length", "length"]


def test_a_prompt_may_fill_the_whole_context_if_nothing_is_generated(llm: LLM, hf: Any) -> None:
    tokens = [3 + index % 300 for index in range(llm.engine.max_model_len)]
    (result,) = llm.generate([tokens], PROMPT_ONLY, use_tqdm=False)
    check_logprobs(hf, tokens, result.prompt_logprobs, 0)
    with pytest.raises(InvalidParameter, match="at most 256 fit"):
        llm.generate([[*tokens, 3]], PROMPT_ONLY, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="leave room for an answer"):
        llm.generate([tokens], SCORED, use_tqdm=False)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_prompts_preempted_in_the_middle_are_scored_once_and_pooled_whole(
    folder: Path, hf: Any, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Urgent requests take the slots of prompts that are half computed."""

    def slot_to_take(ordering: PriorityOrdering, request: Request, running: Sequence[Request]) -> Request | None:
        last = max(running, key=ordering.rank)
        return last if last.priority > request.priority else None

    monkeypatch.setattr(PriorityOrdering, "takes_slots", True)
    monkeypatch.setattr(PriorityOrdering, "slot_to_take", slot_to_take)
    small = LLM(
        str(folder),
        kv_memory="4MiB",
        max_prefill_tokens=8,
        max_batch_requests=2,
        block_size=8,
        preemption=preemption,
        order="priority",
    )
    engine, tokenizer = small.engine, small.get_tokenizer()
    prompt = tokenizer.encode(SENTENCES[0] + SENTENCES[3])

    def outputs_of(params: SamplingParams) -> list[PromptScored | PromptPooled]:
        engine.submit(prompt, params, priority=9, cache_salt=str(params))
        events: list[Event] = []
        while engine.has_work:
            steps = sum(isinstance(event, StepDone) for event in events)
            if steps in (2, 7):
                for _ in range(2):
                    engine.submit([5, 6, 7], SamplingParams(max_tokens=2))
            events += engine.step()
        preempted = [event for event in events if isinstance(event, RequestPreempted)]
        assert len(preempted) == 2
        assert all(0 < event.computed_tokens < len(prompt) - 8 for event in preempted)
        assert all(event.swapped == (preemption == "swap") for event in preempted)
        return [event for event in events if isinstance(event, (PromptScored, PromptPooled))]

    entries = [one for event in outputs_of(SCORED) if isinstance(event, PromptScored) for one in event.logprobs]
    expected = expected_logprobs(hf, prompt)
    assert [one.token_id for one in entries] == prompt[1:]
    assert all(abs(one.logprob - float(expected[i, one.token_id])) < 1e-3 for i, one in enumerate(entries))
    for kind in ("mean", "last"):
        (found,) = outputs_of(pooled(kind))
        assert isinstance(found, PromptPooled)
        check_embedding(hf, prompt, list(found.vector), kind)
    check_quiescent(engine.scheduler)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_transformers(llm: LLM, hf: Any, pooling: str) -> None:
    texts = [*SENTENCES, SENTENCES[0], "b"]
    for _ in range(2):  # the second time with a warm prefix cache
        for result in llm.embed(texts, pooling=pooling, use_tqdm=False):
            check_embedding(hf, result.prompt_token_ids, result.outputs.embedding, pooling)


def test_dimensions_and_normalisation(llm: LLM, hf: Any) -> None:
    (whole,) = llm.embed(SENTENCES[1], normalize=False, use_tqdm=False)
    expected = expected_embedding(hf, whole.prompt_token_ids, "mean")
    assert torch.allclose(torch.tensor(whole.outputs.embedding), expected, atol=1e-4)
    (short,) = llm.embed(SENTENCES[1], dimensions=16, use_tqdm=False)
    assert torch.allclose(torch.tensor(short.outputs.embedding), expected[:16] / expected[:16].norm(), atol=1e-4)
    with pytest.raises(InvalidParameter, match="dimensions: must be at most 64"):
        llm.embed("a", dimensions=65, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="pooling: must be mean or last or cls"):
        llm.embed("a", pooling="first", use_tqdm=False)


def test_scores_are_cosines(llm: LLM) -> None:
    texts = SENTENCES[:3]
    vectors = [torch.tensor(one.outputs.embedding) for one in llm.embed(texts, use_tqdm=False)]
    scores = [one.outputs.score for one in llm.score(texts[0], texts, use_tqdm=False)]
    assert scores == pytest.approx([float(vectors[0] @ vector) for vector in vectors], abs=1e-5)
    assert scores[0] == pytest.approx(1.0)
    with pytest.raises(InvalidParameter, match="text_1"):
        llm.score(texts[:2], texts, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="instruction"):
        llm.score(texts[0], texts, instruction="find the lift", use_tqdm=False)


def test_a_reranker_is_scored_by_its_answers(folder: Path, hf: Any, tmp_path: Path) -> None:
    """A checkpoint that names its two answers: here two tokens of the tiny vocabulary."""
    reranker = tmp_path / "reranker"
    shutil.copytree(folder, reranker)
    config = json.loads((reranker / "config.json").read_text())
    (reranker / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["n", "y"]}))
    llm = LLM(str(reranker), kv_memory="4MiB", max_model_len=256)
    tokenizer = llm.get_tokenizer()
    (found,) = llm.score("lift?", "a lift", instruction="judge", use_tqdm=False)
    system = tokenizer.apply_chat_template(
        [
            {
                "role": "system",
                "content": "Judge whether the Document meets the requirements based on the Query and the Instruct "
                'provided. Note that the answer can only be "yes" or "no".',
            },
            {"role": "user", "content": "<Instruct>: judge\n<Query>: lift?\n<Document>: a lift"},
        ]
    )
    row = expected_logprobs(hf, tokenizer.encode(system))[-1]
    no, yes = (float(row[tokenizer.token_id(answer) or 0]) for answer in ("n", "y"))
    assert found.outputs.score == pytest.approx(math.exp(yes) / (math.exp(yes) + math.exp(no)), abs=1e-4)


def test_beam_search_returns_all_beams(llm: LLM) -> None:
    (result,) = llm.beam_search("a chair", 3, max_tokens=4, use_tqdm=False, ignore_eos=True)
    by_params = SamplingParams(n=3, beam_width=3, temperature=0.0, max_tokens=4, ignore_eos=True)
    (expected,) = llm.generate("a chair", by_params, use_tqdm=False)
    assert [output.token_ids for output in result.outputs] == [output.token_ids for output in expected.outputs]
    assert len(result.outputs) == 3


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "beam_width": 2}, "prompt_logprobs"),
        ({"max_tokens": 0, "beam_width": 2}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"pooling": "mean"}, "pooling"),
    ],
)
def test_bad_parameters_are_refused_by_name(given: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**given)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("given", [{"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": 1}])
def test_pooling_goes_without_generation(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        pooled("mean").clone(**given)
    assert caught.value.parameter == next(iter(given))


def test_chats_may_continue_their_final_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The lift "}]
    params = SCORED.clone(prompt_logprobs=None)
    (found,) = llm.chat(messages, params, continue_final_message=True, use_tqdm=False)
    assert found.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe lift "
    (expected,) = llm.generate([found.prompt_token_ids], params, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("architecture", ["Qwen3Model", "LlamaModel"])
def test_embedding_checkpoints(tmp_path: Path, architecture: str) -> None:
    """A backbone without a head, with the files of sentence-transformers and a tokenizer that appends a token."""
    folder = write_embedding_checkpoint(tmp_path / "embedder", architecture)
    llm = LLM(str(folder), kv_memory="4MiB", max_prefill_tokens=8)
    backbone = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    for text, result in zip(SENTENCES, llm.embed(SENTENCES, use_tqdm=False), strict=True):
        tokens = result.prompt_token_ids
        assert tokens == [*llm.get_tokenizer().encode(text, add_special_tokens=False), 0]
        with torch.inference_mode():
            expected = backbone(torch.tensor([tokens])).last_hidden_state[0, -1]
        found = torch.tensor(result.outputs.embedding)
        assert float(torch.nn.functional.cosine_similarity(found, expected, dim=0)) > 0.9999
    assert llm.score(SENTENCES[0], SENTENCES[0], use_tqdm=False)[0].outputs.score == pytest.approx(1.0)
    for params in (SCORED, PROMPT_ONLY):
        with pytest.raises(InvalidParameter, match="model: has no language-model head"):
            llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("speculate", ["ngram", "layers:1"])
def test_prompt_outputs_beside_draft_tokens(folder: Path, hf: Any, speculate: str) -> None:
    llm = LLM(str(folder), kv_memory="4MiB", max_prefill_tokens=8, speculate=speculate, draft_length=2)
    params = [SCORED.clone(max_tokens=12), SCORED, pooled("mean"), pooled("last")]
    results = llm.generate(SENTENCES, params, use_tqdm=False)
    for result in results[:2]:
        check_logprobs(hf, result.prompt_token_ids, result.prompt_logprobs, 4)
    check_embedding(hf, results[2].prompt_token_ids, results[2].require_vector(), "mean")
    check_embedding(hf, results[3].prompt_token_ids, results[3].require_vector(), "last")


@pytest.mark.parametrize("params", [SCORED, pooled("mean")])
def test_an_executor_without_prompt_outputs_refuses_them(params: SamplingParams) -> None:
    with pytest.raises(InvalidParameter, match="this executor returns nothing about prompts"):
        echo_executor.make_engine("a b").check([1, 2], params)


def write_embedding_checkpoint(folder: Path, architecture: str) -> Path:
    write_tiny_checkpoint(folder)
    tokenizer = byte_level_tokenizer()
    add_special_tokens(tokenizer, bos=None, eos="<|endoftext|>")
    tokenizer.save(str(folder / "tokenizer.json"))
    options = json.loads((folder / "config.json").read_text())
    config = getattr(transformers, architecture).config_class(
        **{name: options[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        **{name: options[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")},
        head_dim=16,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(1)
    getattr(transformers, architecture)(config).save_pretrained(folder)
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder

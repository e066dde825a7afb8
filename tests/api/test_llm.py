"""The offline API on a tiny model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.core.budgets.base import BatchLoad
from chairlift.core.events import StepDone
from chairlift.core.integrity import check_quiescent
from chairlift.errors import EngineDead, InvalidParameter, ModelNotFound
from chairlift.options import options_of
from tests.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_memory="4MiB", seed=0)


@pytest.fixture(autouse=True)
def check_quiescent_afterwards(llm: LLM) -> Any:
    yield
    llm.engine.step()  # reports the requests that a test cancelled
    check_quiescent(llm.engine.scheduler)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a chairlift", "many sequences of different length", "b", "shared blocks are freed"]
    lengths = [9, 2, 5, 1]
    params = [GREEDY.clone(max_tokens=length) for length in lengths]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == lengths
    tokenizer = llm.get_tokenizer()
    for result in results:
        (output,) = result.outputs
        assert result.prompt_token_ids == tokenizer.encode(result.prompt or "")
        assert output.text == tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length"
        assert result.finished


def test_prompt_forms_agree(llm: LLM) -> None:
    text = "finished requests step off"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, [text], ids, [ids], {"prompt": text}, {"prompt_token_ids": ids}, [{"prompt": text}]]
    answers = [llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for form in forms]
    assert all(answer == answers[0] for answer in answers)


def test_metrics_and_cached_tokens(llm: LLM) -> None:
    prompt = "blocks are shared, copied on write and freed in the same step by the engine"
    (first,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    (second,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert second.cached_tokens >= 16
    assert second.cached_tokens % 16 == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    metrics = second.metrics
    assert metrics.queued is not None
    assert metrics.time_to_first_token is not None
    assert metrics.end_to_end is not None
    assert 0 <= metrics.queued <= metrics.time_to_first_token <= metrics.end_to_end
    assert len(metrics.inter_token) == 7


def test_prefixes_with_different_cache_salts_are_not_shared(llm: LLM) -> None:
    ids = [7 + i % 40 for i in range(50)]
    llm.generate({"prompt_token_ids": ids, "cache_salt": "a"}, GREEDY, use_tqdm=False)
    (same,) = llm.generate({"prompt_token_ids": ids, "cache_salt": "a"}, GREEDY, use_tqdm=False)
    (other,) = llm.generate({"prompt_token_ids": ids, "cache_salt": "b"}, GREEDY, use_tqdm=False)
    assert (same.cached_tokens, other.cached_tokens) == (48, 0)


def test_a_shared_prefix_is_stored_once(llm: LLM) -> None:
    """Three requests with 200 common tokens, submitted together with a cold cache."""
    engine = llm.engine
    prefix = [5 + (7 * i) % 200 for i in range(200)]
    for tail in range(3):
        engine.submit([*prefix, 250 + tail, 3], GREEDY)
    peak, shared_steps = 0, 0
    while engine.has_work:
        peak = max([peak, *(event.used_blocks for event in engine.step() if isinstance(event, StepDone))])
        tables = list(engine.scheduler.kv.tables().values())
        if len(tables) == 3:
            shared_steps += 1
            assert tables[0][:12] == tables[1][:12] == tables[2][:12]
    assert shared_steps > 0
    # 12 shared blocks of the prefix, one block for each request, and in the first request's last step, when the
    # others are a step behind, its second.
    assert peak == 12 + 3 + 1


def test_n_completions_share_the_prompt(llm: LLM) -> None:
    prompt = [9 + i % 60 for i in range(70)]
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    engine = llm.engine
    ids = engine.submit(prompt, params)
    assert len(ids) == 4
    peak = 0
    while engine.has_work:
        peak = max([peak, *(event.used_blocks for event in engine.step() if isinstance(event, StepDone))])
    assert peak == 4 + 4  # 64 tokens in 4 shared blocks, and one more for each completion
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in result.outputs}) > 1
    (again,) = llm.generate(prompt, params, use_tqdm=False)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]


def test_a_seeded_request_does_not_depend_on_its_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=10, top_p=0.95, ignore_eos=True)
    (alone,) = llm.generate("a ragged batch", params, use_tqdm=False)
    crowd = [SamplingParams(temperature=1.2, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(9)]
    prompts = ["a ragged batch", *("neighbour number " + "x" * i for i in range(9))]
    crowded = llm.generate(prompts, [params, *crowd], use_tqdm=False)
    assert crowded[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_greedy_n_completions_are_equal_and_equal_to_one(llm: LLM) -> None:
    (one,) = llm.generate("waiting ones get on", GREEDY, use_tqdm=False)
    (three,) = llm.generate("waiting ones get on", GREEDY.clone(n=3), use_tqdm=False)
    assert all(output.token_ids == one.outputs[0].token_ids for output in three.outputs)


def test_a_stop_string_across_tokens(llm: LLM) -> None:
    (whole,) = llm.generate("a chairlift never", GREEDY.clone(max_tokens=30), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = text.index(stop)
    (result,) = llm.generate("a chairlift never", GREEDY.clone(max_tokens=30, stop=stop), use_tqdm=False)
    output = result.outputs[0]
    assert output.text == text[:cut]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 30
    kept = GREEDY.clone(max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("a chairlift never", kept, use_tqdm=False)[0].outputs[0].text == text[: cut + len(stop)]


def test_stop_tokens_and_min_tokens(llm: LLM) -> None:
    (whole,) = llm.generate("the engine", GREEDY, use_tqdm=False)
    tokens = whole.outputs[0].token_ids
    stop_id = tokens[3]
    first = tokens.index(stop_id)
    (result,) = llm.generate("the engine", GREEDY.clone(stop_token_ids=[stop_id]), use_tqdm=False)
    output = result.outputs[0]
    assert output.token_ids == tokens[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)
    assert output.text == llm.get_tokenizer().decode(tokens[:first])
    late = GREEDY.clone(stop_token_ids=[stop_id], min_tokens=6)
    assert len(llm.generate("the engine", late, use_tqdm=False)[0].outputs[0].token_ids) >= 6


def test_logprobs(llm: LLM) -> None:
    (result,) = llm.generate("shared", GREEDY.clone(logprobs=3), use_tqdm=False)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 8
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 3
        assert sum(math.exp(item.logprob) for item in entry.values()) <= 1.0 + 1e-5
    total = sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_chat_one_and_many(llm: LLM) -> None:
    messages = [{"role": "user", "content": "when does the lift stop?"}]
    (one,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nwhen does the lift stop?<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([messages, [{"role": "user", "content": "never"}]], GREEDY, use_tqdm=False)
    assert len(both) == 2
    assert both[0].outputs[0].token_ids == one.outputs[0].token_ids


@pytest.mark.parametrize("messages", ["hello", None, [None], [[]], [{"role": "user", "content": "a"}, None], ["a"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidParameter, match="messages: must be one conversation or several"):
            call(messages)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 0.5, {}])
def test_what_are_no_parameters_is_refused(llm: LLM, params: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for call, prompt in ((llm.generate, "a"), (llm.stream, "a"), (llm.chat, messages), (llm.stream_chat, messages)):
        with pytest.raises(InvalidParameter, match=f"must be SamplingParams, got {type(params).__name__}"):
            call(prompt, params)


def test_streams_of_several_prompts_add_up(llm: LLM) -> None:
    prompts = ["a chairlift", "many sequences"]
    params = GREEDY.clone(max_tokens=12, n=2)
    whole = llm.generate(prompts, params, use_tqdm=False)
    texts: dict[tuple[int, int], str] = {}
    endings = {}
    for piece in llm.stream(prompts, params):
        key = (piece.prompt_index, piece.completion_index)
        texts[key] = texts.get(key, "") + piece.text
        if piece.finish_reason:
            endings[key] = piece.finish_reason
    for i, j in itertools.product(range(2), range(2)):
        assert texts[i, j] == whole[i].outputs[j].text
        assert endings[i, j] == "length"


def test_closing_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream("a chairlift", GREEDY.clone(max_tokens=200, n=3))
    next(stream)
    assert llm.engine.scheduler.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.has_work


def test_a_stream_that_is_never_read_queues_nothing(llm: LLM) -> None:
    llm.stream("a chairlift", GREEDY).close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    with pytest.raises(InvalidParameter):
        llm.stream("", GREEDY)  # bad input still raises at once


def test_generate_while_streams_are_open(llm: LLM) -> None:
    """Each call gets its own results, even if another call steps the engine."""
    prompts, params = ["a chairlift", "many sequences"], GREEDY.clone(max_tokens=12)
    whole = llm.generate(prompts, params, use_tqdm=False)
    stream = llm.stream(prompts, params)
    pieces = [next(stream)]
    (other,) = llm.generate("shared blocks", GREEDY.clone(max_tokens=30), use_tqdm=False)
    assert len(other.outputs[0].token_ids) == 30
    pieces += stream
    for index, result in enumerate(whole):
        own = [piece for piece in pieces if piece.prompt_index == index]
        assert "".join(piece.text for piece in own) == result.outputs[0].text
        assert [token for piece in own for token in piece.token_ids] == result.outputs[0].token_ids
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["length"]


def test_the_engine_works_after_an_interrupted_generate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    (before,) = llm.generate("a chairlift", GREEDY, use_tqdm=False)
    with monkeypatch.context() as patched:
        patched.setattr(llm.runner.sampler, "sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a chairlift", "many"], GREEDY.clone(n=2), use_tqdm=False)
    check_quiescent(llm.engine.scheduler)
    (after,) = llm.generate("a chairlift", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_timeout_ends_unfinished_requests(llm: LLM) -> None:
    (result,) = llm.generate("a", GREEDY.clone(max_tokens=200), use_tqdm=False, timeout=1e-9)
    assert result.outputs[0].finish_reason == "deadline"


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    (result,) = llm.generate([5] * 250, GREEDY.clone(max_tokens=None), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 6
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ("", GREEDY, "prompt"),
        (None, GREEDY, "prompts"),
        ([], GREEDY, "prompts"),
        ([[]], GREEDY, "prompt"),
        ([1, 2, 10**6], GREEDY, "prompt"),
        ([1, -2], GREEDY, "prompt"),
        ([[1, 2.5]], GREEDY, "prompt"),
        ([5] * 256, GREEDY, "prompt"),
        ({"prompt": "a", "colour": 1}, GREEDY, "prompt"),
        ({"prompt": 3}, GREEDY, "prompt"),
        ({"prompt": "a", "cache_salt": 3}, GREEDY, "cache_salt"),
        ("a", GREEDY.clone(stop_token_ids=[10**6]), "stop_token_ids"),
        ("a", GREEDY.clone(logit_bias={10**6: 1.0}), "logit_bias"),
        ([5] * 250, GREEDY.clone(max_tokens=100, min_tokens=50), "min_tokens"),
        (["a", "b"], [GREEDY], "sampling_params"),
    ],
)
def test_bad_input_raises_with_its_name_and_queues_nothing(llm: LLM, prompt: Any, params: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        llm.generate(prompt, params, use_tqdm=False)
    assert refusal.value.parameter == parameter
    assert not llm.engine.scheduler.has_work


def test_one_bad_prompt_among_good_ones_queues_none(llm: LLM) -> None:
    with pytest.raises(InvalidParameter):
        llm.generate([[1, 2], [3, 10**6]], GREEDY, use_tqdm=False)
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"device": "abacus"}, "device"),
        ({"attention": "telepathy"}, "attention"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_batch_tokens": 4, "max_batch_requests": 8}, "max_batch_requests"),
        ({"max_model_len": 10_000}, "max_model_len"),
        ({"kv_memory": "some"}, "kv_memory"),
        ({"kv_memory": 10}, "kv_memory"),
        ({"block_size": -1}, "block_size"),
        ({"seed": "x"}, "seed"),
        ({"enable_prefix_caching": "no"}, "prefix_caching"),
        ({"colour": "red"}, "colour"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"memory_share": 1.5}, "memory_share"),
        ({"gpu_memory_utilization": 0.9, "kv_memory": "1GiB"}, "memory_share"),
        ({"max_num_seqs": 2, "max_batch_requests": 2}, "max_batch_requests"),
    ],
)
def test_errors_name_the_invalid_option(folder: Path, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        LLM(str(folder), **options)
    assert refusal.value.parameter == parameter


def test_every_field_of_the_config_is_a_declared_option() -> None:
    names = [item.name for item in dataclasses.fields(EngineConfig)]
    assert [option.name for option in options_of(EngineConfig)] == names


def test_option_names_of_vllm_are_accepted(folder: Path) -> None:
    llm = LLM(
        model=str(folder),
        max_num_seqs=3,
        max_num_batched_tokens=40,
        enable_prefix_caching=False,
        trust_remote_code=False,
        tensor_parallel_size=1,
        kv_memory="1MiB",
    )
    assert llm.engine.scheduler.max_batch_requests == 3
    assert llm.engine.scheduler.budget.limits(BatchLoad([], [], 0.0)).tokens == 40
    assert not llm.engine.scheduler.kv.prefix_caching


def test_an_unknown_model_error_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        LLM("no-such-model")


def test_a_request_too_big_for_the_cache_is_refused(folder: Path) -> None:
    llm = LLM(str(folder), kv_memory=2 * 16 * 512)  # 32 tokens
    with pytest.raises(InvalidParameter, match="kv_memory"):
        llm.generate([5] * 30, GREEDY, use_tqdm=False)
    assert len(llm.generate([5] * 20, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_step_that_fails_ends_every_request_and_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder), kv_memory="1MiB")

    def explode(plan: object) -> None:
        raise RuntimeError("the device failed")

    monkeypatch.setattr(llm.runner, "launch", explode)
    ids = [llm.engine.submit([1, 2, 3], GREEDY)[0] for _ in range(3)]
    finished = [event for event in llm.engine.step() if type(event).__name__ == "RequestFinished"]
    assert [event.request_id for event in finished] == ids
    assert all("the device failed" in str(event.ending.detail) for event in finished)
    with pytest.raises(EngineDead, match="the device failed"):
        llm.generate("more", GREEDY, use_tqdm=False)

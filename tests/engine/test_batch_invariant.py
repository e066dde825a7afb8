"""With `batch_invariant`, what a request gets does not depend on its neighbours: bit for bit, logprobs included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import RequestPreempted, TokenProduced
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.errors import InvalidParameter
from tests.kernels.tiny_config import CONFIG
from tests.tiny import write_tiny_checkpoint

LENGTHS = (5, 40, 1, 17, 90, 33)
Answer = list[tuple[int, float]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def config(**options: object) -> EngineConfig:
    defaults: dict[str, object] = {"device": "cpu", "kv_memory": "4MiB", "prefix_caching": False, "block_size": 4}
    return EngineConfig(**(defaults | {"batch_invariant": True} | options))  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]


def answers(engine: Engine, asked: list[list[int]]) -> tuple[list[Answer], int]:
    """Of each prompt: its tokens and the log-probability of each, greedy and drawn in turns."""
    for index, prompt in enumerate(asked):
        params = SamplingParams(
            temperature=float(len(prompt) % 2), seed=3, max_tokens=10, ignore_eos=True, logprobs=0, detokenize=False
        )
        engine.submit(prompt, params, request_id=str(index))
    found: list[Answer] = [[] for _ in asked]
    preemptions = 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                assert event.logprobs is not None
                found[int(event.request_id)].append((event.token, event.logprobs.logprob))
            preemptions += isinstance(event, RequestPreempted)
    engine.check_alive()
    return found, preemptions


def check_all_batches(loaded: LoadedModel, **options: object) -> None:
    asked = prompts()
    alone = [answers(start_engine(loaded, config(**options)).engine, [prompt])[0][0] for prompt in asked]
    together, _ = answers(start_engine(loaded, config(**options)).engine, asked)
    assert together == alone
    chunked = start_engine(loaded, config(**options, max_batch_tokens=19, max_batch_requests=6)).engine
    assert answers(chunked, asked)[0] == alone
    memory = 2**14 * loaded.model.dtype.itemsize
    cramped = start_engine(loaded, config(**options | {"kv_memory": memory}, max_batch_requests=8)).engine
    again, preemptions = answers(cramped, asked)
    assert preemptions > 0, "nobody was computed a second time"
    assert again == alone


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_alone_together_in_chunks_and_after_preemptions(tiny: str, quantization: str) -> None:
    loaded = load_model(tiny, config(quantization=quantization), progress=False)
    check_all_batches(loaded, quantization=quantization, kv_dtype="float32")


def test_mixture_of_experts(tmp_path: Path) -> None:
    shape = CONFIG | {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    loaded = load_model(str(tmp_path), config(load_format="dummy"), progress=False)
    asked = prompts()
    together, _ = answers(start_engine(loaded, config(max_batch_tokens=50)).engine, asked)
    for prompt, answer in zip(asked[:3], together, strict=False):
        assert answers(start_engine(loaded, config()).engine, [prompt])[0][0] == answer


LARGE = CONFIG | {"hidden_size": 400, "intermediate_size": 700, "vocab_size": 6001}
MIXED = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 700}


@pytest.mark.parametrize("other", [{}, {"model_type": "gemma2"}, MIXED], ids=["qwen3", "gemma2", "qwen3_moe"])
def test_models_large_enough_for_two_threads(tmp_path: Path, other: dict[str, object]) -> None:
    """Beyond 32,768 numbers torch cuts its work by the number of threads: here the activations of a step, its hidden
    states and its logits have more, and those of most requests alone have fewer."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE | other))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loaded = load_model(str(tmp_path), config(load_format="dummy"), progress=False)
        asked = prompts()
        together, _ = answers(start_engine(loaded, config(max_batch_tokens=190)).engine, asked)
        for place in (1, 4):
            assert answers(start_engine(loaded, config()).engine, [asked[place]])[0][0] == together[place]
    finally:
        torch.set_num_threads(threads)


def test_what_is_refused(tiny: str) -> None:
    with pytest.raises(InvalidParameter, match=r"batch_invariant.*speculate"):
        config(speculate="layers:1")
    with pytest.raises(InvalidParameter, match=r"batch_invariant.*true or false"):
        config(batch_invariant=1)
    loaded = load_model(tiny, config(), progress=False)
    for attention in ("bursted", "padded"):
        with pytest.raises(InvalidParameter, match=rf"batch_invariant.*{attention}.*depends on the batch"):
            start_engine(loaded, config(attention=attention))
    halved = load_model(tiny, config(dtype="bfloat16"), progress=False)
    with pytest.raises(InvalidParameter, match=r"batch_invariant.*float32"):
        start_engine(halved, config(dtype="bfloat16"))
    plain = load_model(tiny, config(batch_invariant=False), progress=False)
    with pytest.raises(InvalidParameter, match=r"batch_invariant.*loaded without it"):
        start_engine(plain, config())

"""With `batch_invariant`, a request's tokens and logprobs do not depend on the rest of the batch, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chairlift.engine.startup import load_model, start_engine
from chairlift.errors import InvalidParameter
from tests.engine.invariance import check_all_batches, config, generate, prompts
from tests.kernels.tiny_config import CONFIG
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_tokens_are_the_same_alone_together_in_chunks_and_after_preemptions(tiny: str, quantization: str) -> None:
    loaded = load_model(tiny, config(quantization=quantization), progress=False)
    check_all_batches(loaded, quantization=quantization, kv_dtype="float32")


def test_tokens_of_a_mixture_of_experts_are_the_same_in_any_batch(tmp_path: Path) -> None:
    shape = CONFIG | {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    loaded = load_model(str(tmp_path), config(load_format="dummy"), progress=False)
    prompt_ids = prompts()
    together, _ = generate(start_engine(loaded, config(max_batch_tokens=50)).engine, prompt_ids)
    for prompt, scored in zip(prompt_ids[:3], together, strict=False):
        assert generate(start_engine(loaded, config()).engine, [prompt])[0][0] == scored


LARGE = CONFIG | {"hidden_size": 400, "intermediate_size": 700, "vocab_size": 6001}
MIXED = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 700}


@pytest.mark.parametrize("other", [{}, {"model_type": "gemma2"}, MIXED], ids=["qwen3", "gemma2", "qwen3_moe"])
def test_models_large_enough_for_two_threads_are_invariant_too(tmp_path: Path, other: dict[str, object]) -> None:
    """Torch splits tensors of more than 32,768 numbers between threads: the activations, hidden states and logits of
    the batch are larger than that, those of most single requests are smaller."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE | other))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loaded = load_model(str(tmp_path), config(load_format="dummy"), progress=False)
        prompt_ids = prompts()
        together, _ = generate(start_engine(loaded, config(max_batch_tokens=190)).engine, prompt_ids)
        for place in (1, 4):
            assert generate(start_engine(loaded, config()).engine, [prompt_ids[place]])[0][0] == together[place]
    finally:
        torch.set_num_threads(threads)


def test_combinations_that_are_not_invariant_are_refused(tiny: str) -> None:
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

"""The default model on the GPU, against transformers there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.engine.startup import LoadedModel, load_model
from chairlift.runner.gpu import runner as gpu_runner
from tests.comparison import reference_tokens
from tests.gpu.greedy import compare_rounded, count_ties, generate, rounding_row
from tests.prompts import CHATS, SHORT, long_text

pytestmark = pytest.mark.gpu

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def loaded(default_model_file: Path) -> LoadedModel:
    return load_model(str(default_model_file), EngineConfig(device="cuda", dtype="float32"), progress=False)


@pytest.fixture(scope="module")
def prompt_ids(loaded: LoadedModel) -> list[list[int]]:
    tokenizer = loaded.tokenizer
    texts = [tokenizer.encode(text) for text in SHORT]
    texts += [tokenizer.encode_chat([{"role": "user", "content": question}])[1] for question in CHATS]
    long = tokenizer.encode(long_text())
    return [*texts, long[:90], long[90:250], long[250:850], long[300:1800]]


@pytest.fixture(scope="module")
def hf(default_model_file: Path) -> Any:
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder, name = default_model_file.parent, default_model_file.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval().to("cuda")


def test_greedy_tokens_equal_transformers(
    loaded: LoadedModel, hf: Any, prompt_ids: list[list[int]], record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [reference_tokens(hf, prompt, NEW_TOKENS) for prompt in prompt_ids]
    runs = [
        generate(loaded, prompt_ids, NEW_TOKENS, **options)
        for options in (
            {},
            {"cuda_graphs": False},
            {"max_batch_requests": 1},
            {"max_prefill_tokens": 100, "prefix_caching": False},
            {"num_blocks": 110, "max_batch_requests": 32},
            {"num_blocks": 110, "max_batch_requests": 32, "preemption": "swap", "swap_memory": "1GiB"},
        )
    ]
    monkeypatch.setattr(gpu_runner, "STEPS_AHEAD", 0)
    runs += [generate(loaded, prompt_ids, NEW_TOKENS), generate(loaded, prompt_ids, NEW_TOKENS, cuda_graphs=False)]
    assert runs[4].num_preemptions > 0
    assert runs[5].num_preemptions > 0
    ties = sum(count_ties(hf, prompt_ids, expected, run.outputs) for run in runs)
    tokens = sum(map(len, expected))
    record_property(
        "greedy", {"model": "the default model", "settings": len(runs), "tokens": tokens, "ties within 1e-4": ties}
    )


def test_rounded_tokens_differ_at_near_ties_only(
    default_model_file: Path, hf: Any, prompt_ids: list[list[int]], record_property: Any
) -> None:
    rounded = load_model(str(default_model_file), EngineConfig(device="cuda", dtype="bfloat16"), progress=False)
    outputs = generate(rounded, prompt_ids, NEW_TOKENS).outputs
    found = compare_rounded(hf.bfloat16(), prompt_ids, outputs)  # no later test uses it in float32
    record_property("rounding", rounding_row("the default model", found))
    assert found.all_near_ties, found

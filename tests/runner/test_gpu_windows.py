"""Layers with windows on the GPU runner: a request has several block tables on the device, and the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chairlift.core.integrity import check_quiescent
from chairlift.core.kv.windowed_cache import GroupedCache, WindowedCache
from chairlift.core.sampling.params import SamplingParams
from tests.runner.gpu_engine import generate, make_engine, random_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 10,
    },
    "one window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 10},
}


@pytest.mark.parametrize(("name", "num_blocks"), [("grouped", 99), ("grouped", 25), ("one window", 12)])
def test_greedy_tokens_equal_those_of_the_cpu_runner(name: str, num_blocks: int, device: torch.device) -> None:
    """Cold and with a warm cache, with much and with little memory."""
    model = random_model(device, CONFIGS[name])
    prompts = [list(range(7, 30)), list(range(50, 90)), [5, 9, 11]]
    requests = [(prompts[0], GREEDY), (prompts[1], GREEDY.clone(n=2)), (prompts[2], GREEDY)]
    expected, _ = generate(make_engine(model, gpu=False, num_blocks=99), requests)
    engine = make_engine(model, gpu=True, num_blocks=num_blocks, prefill=9)
    assert isinstance(engine.scheduler.kv, GroupedCache if name == "grouped" else WindowedCache)
    assert generate(engine, requests)[0] == expected
    assert generate(engine, requests)[0] == expected
    check_quiescent(engine.scheduler)
    assert len({token for tokens in expected.values() for token in tokens}) > 7, "the tokens vary too little"

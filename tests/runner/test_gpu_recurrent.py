"""Recurrent layers on the GPU runner: the same tokens as on the CPU runner, from states at fixed addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chairlift.core.integrity import check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel
from chairlift.models.base import CausalLM
from chairlift.runner.gpu.runner import GPURunner
from chairlift.text.tokenizer import Tokenizer
from tests.runner.gpu_engine import generate, make_engine, random_model, random_prompts
from tests.runner.gpu_speculation import plain, start
from tests.speculation.running import run
from tests.text import backends

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


@pytest.fixture(scope="module")
def hybrid(device: torch.device) -> CausalLM:
    return random_model(device, CONFIG)


def poison(engine: Engine) -> None:
    """Fill all states with NaN, so that reading one that was not written shows."""
    assert isinstance(engine.executor, GPURunner)
    assert engine.executor.states is not None
    for tensors in engine.executor.states.layers:
        for tensor in tensors.values():
            tensor.fill_(torch.nan)


@pytest.mark.parametrize(
    ("num_blocks", "num_states"),
    [(64, 20), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((9, 20), (64, 4)))],
)
def test_greedy_tokens_equal_those_of_the_cpu_runner(hybrid: CausalLM, num_blocks: int, num_states: int) -> None:
    """Cold and with a warm cache; also of several completions, which share the state of their prompt."""
    prompts = random_prompts(3, 24)
    requests = [(prompts[0], GREEDY), (prompts[1], GREEDY.clone(n=2)), (prompts[2], GREEDY)]
    expected, _ = generate(make_engine(hybrid, gpu=False), requests)
    engine = make_engine(hybrid, gpu=True, num_blocks=num_blocks, num_states=num_states, prefill=9)
    poison(engine)
    assert generate(engine, requests)[0] == expected
    assert generate(engine, requests)[0] == expected
    assert expected["r1"] == expected["r1#1"]
    check_quiescent(engine.scheduler)
    assert len({token for tokens in expected.values() for token in tokens}) > 7, "the tokens vary too little"


@pytest.mark.usefixtures("paged_backend")
def test_drafts_leave_the_state_of_the_last_accepted_one(hybrid: CausalLM) -> None:
    loaded = LoadedModel("hybrid", hybrid, Tokenizer(backends.byte_level()), frozenset())
    work = [([7, 8, 9, 10] * 4 + [11 + index], GREEDY.clone(max_tokens=6)) for index in range(2)]
    engine = start(loaded, max_model_len=96)
    poison(engine)
    found = run(engine, work)
    assert found.proposed > found.accepted
    assert found.outcomes == plain(loaded, work).outcomes

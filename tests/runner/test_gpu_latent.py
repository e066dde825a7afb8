"""Models with latent attention and experts on the GPU runner generate the same tokens as on the CPU runner."""

from __future__ import annotations

import torch

from chairlift.core.sampling.params import SamplingParams
from tests.runner.gpu_engine import generate, make_engine, random_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
SHAPE = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 0,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
}


def test_greedy_tokens_equal_those_of_the_cpu_runner(device: torch.device) -> None:
    """Decodes beside chunks with and without a context, and cached prefixes."""
    model = random_model(device, SHAPE)
    requests = [(prompt, GREEDY) for prompt in random_prompts(3)]
    expected, _ = generate(make_engine(model, gpu=False, prefill=12), requests)
    assert generate(make_engine(model, gpu=True, prefill=12), requests)[0] == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 4, "the tokens vary too little"

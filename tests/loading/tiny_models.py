"""Tiny random models of every family, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(theta: float, kind: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
}
_LONG_ROPE = {"long_factor": [1.5, 2.0, 3.5, 4.0, 5.0, 6.0], "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}

# name -> (model_type, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5} | _rope(10000.0)),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True} | _rope(10000.0)),
    "llama 3": (
        "llama",
        {"tie_word_embeddings": True} | _rope(500000.0, "llama3", original_max_position_embeddings=8192, **_LLAMA3),
    ),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": 8} | _rope(10000.0)),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2} | _rope(1000000.0)),
    "qwen2": ("qwen2", _rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3": ("qwen3", {"head_dim": 32} | _rope(1000000.0)),
    "qwen3 moe": (
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True}
        | _rope(1000000.0),
    ),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8} | _rope(10000.0)),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7}
        | {"rope_parameters": _GEMMA3_ROPE},
    ),
    "phi3": (
        "phi3",
        {"original_max_position_embeddings": 32, "hidden_size": 64}
        | _rope(
            10000.0,
            "longrope",
            partial_rotary_factor=0.75,
            original_max_position_embeddings=32,
            **_LONG_ROPE,
        ),
    ),
    "olmo2": ("olmo2", _rope(500000.0)),
    "olmo3": ("olmo3", {"sliding_window": 8, "rope_theta": 500000.0}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.5}
        | _rope(10000.0),
    ),
    "glm4": ("glm4", {"head_dim": 32} | _rope(10000.0, partial_rotary_factor=0.5)),
    "cohere": ("cohere", {"logit_scale": 0.7, "tie_word_embeddings": True} | _rope(10000.0)),
    "cohere2": ("cohere2", {"logit_scale": 0.7, "sliding_window": 8} | _rope(50000.0)),
    "exaone4": ("exaone4", {"sliding_window": 8} | _rope(1000000.0)),
    "seed_oss": ("seed_oss", {"head_dim": 32} | _rope(1000000.0)),
    "ernie4_5": ("ernie4_5", {"head_dim": 32} | _rope(500000.0)),
    "starcoder2": ("starcoder2", {"sliding_window": 8} | _rope(100000.0)),
    "nemotron": ("nemotron", _rope(10000.0, partial_rotary_factor=0.5)),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 32} | _rope(10000.0)),
    "arcee": ("arcee", _rope(10000.0)),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2} | _rope(10000.0)),
    "smollm3": ("smollm3", _rope(2000000.0)),
}


def make_model(family: str, **changes: Any) -> Any:
    """Build a model with seeded weights, no norm of ones and no zero bias, so that a wrong tensor changes the
    output."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(SIZES | own | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    return model


def save_model(family: str, folder: Path, **changes: Any) -> Any:
    model = make_model(family, **changes)
    model.save_pretrained(folder)
    return model

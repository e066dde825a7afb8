"""A small model with random weights, for figures that depend on shapes only."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.dummy import dummy_tensors

SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def random_llama(device: torch.device, dtype: torch.dtype) -> CausalLM:
    with torch.inference_mode():
        return build_model(SMALL_LLAMA, dummy_tensors(SMALL_LLAMA, device), dtype=dtype, device=device)

"""A small model with random weights: for figures that depend on shapes and not on what is said."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.models.base import CausalLM

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


def random_llama(device: torch.device, dtype: torch.dtype, *, seed: int = 0, **changes: Any) -> CausalLM:
    """`SMALL_LLAMA` with `changes`; the same arguments give the same weights."""
    from chairlift.models.decoder import Decoder
    from chairlift.models.read_config import decoder_config

    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        model = Decoder(decoder_config(SMALL_LLAMA | changes, None), dtype=dtype, device=device)
        for _, weight in model.targets():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        model.finalize()
    return model

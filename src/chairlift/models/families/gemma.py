"""The Gemma models."""

from __future__ import annotations

from typing import Any

from chairlift.models.config import SANDWICH_NORMS
from chairlift.models.families.base import FAMILIES, Family, all_but_every_nth
from chairlift.models.fields import Fields

_GEMMA: dict[str, Any] = {
    "norms": SANDWICH_NORMS,
    "norm_unit_offset": True,
    "scaled_embeddings": True,
    "activation_key": "hidden_activation",
    "windowed": all_but_every_nth,
}
_DEFAULTS = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}


def _all_but_last_and_every_nth(config: Fields, index: int) -> bool:
    return all_but_every_nth(config, index) and index + 1 < config.integer("num_hidden_layers")


FAMILIES |= {
    "gemma2": Family(
        title="Gemma 2",
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        **_GEMMA,
    ),
    "gemma3_text": Family(
        title="Gemma 3",
        defaults=_DEFAULTS
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        qk_norm="head",
        **_GEMMA,
    ),
    "gemma4_text": Family(
        title="Gemma 4",
        lacks=("enable_moe_block",),
        defaults={
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262_144,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_multiplier": 1.0,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        norms=SANDWICH_NORMS,
        qk_norm="head",
        v_norm=True,
        layer_scalars=True,
        scaled_embeddings=True,
        activation_key="hidden_activation",
        windowed=_all_but_last_and_every_nth,
    ),
}

"""The Gemma models."""

from __future__ import annotations

from typing import Any

from chairlift.models.config import SANDWICH_NORMS
from chairlift.models.families.base import FAMILIES, Family, all_but_every_nth

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
}

"""Families with recurrent layers, most of them beside attention."""

from __future__ import annotations

from typing import Any

from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, Family
from chairlift.models.recurrent import RecurrentFamily, gated_delta, listed_blocks

_QWEN_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_EXPERTS = ExpertsFamily(names=ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate"))
_QWEN: dict[str, Any] = {"qk_norm": "head", "norm_unit_offset": True, "gated_attention": True}
_QWEN3_5: dict[str, Any] = _QWEN | {"recurrent": RecurrentFamily(gated_delta(by_key_head=False), listed_blocks)}

FAMILIES |= {
    "qwen3_next": Family(
        title="Qwen3-Next",
        defaults=_QWEN_DEFAULTS | {"decoder_sparse_step": 1, "norm_topk_prob": True},
        recurrent=RecurrentFamily(gated_delta(by_key_head=True), listed_blocks),
        experts=_QWEN_EXPERTS,
        **_QWEN,
    ),
    "qwen3_5_text": Family(title="Qwen3.5", defaults=_QWEN_DEFAULTS, **_QWEN3_5),
    "qwen3_5_moe_text": Family(
        title="Qwen3.5-MoE", defaults=_QWEN_DEFAULTS | {"norm_topk_prob": True}, experts=_QWEN_EXPERTS, **_QWEN3_5
    ),
}

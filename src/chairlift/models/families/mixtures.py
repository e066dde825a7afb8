"""Families whose feed-forward blocks are mixtures of experts."""

from __future__ import annotations

from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, Family, upper_layers

_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_QWEN2_EXPERTS = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")

FAMILIES |= {
    "mixtral": Family(
        title="Mixtral",
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        experts=ExpertsFamily(names=_MIXTRAL_EXPERTS),
    ),
    "qwen2_moe": Family(
        title="Qwen2-MoE",
        defaults={"max_window_layers": 28, "sliding_window": 4096, "decoder_sparse_step": 1, "qkv_bias": True},
        qkv_bias="qkv_bias",
        output_bias=False,
        windowed=upper_layers,
        window_switch=True,
        experts=ExpertsFamily(names=_QWEN2_EXPERTS),
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        defaults={"sliding_window": 4096, "decoder_sparse_step": 1},
        qk_norm="head",
        window_switch=True,
        experts=ExpertsFamily(),
    ),
}

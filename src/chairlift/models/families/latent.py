"""Families with latent attention (MLA)."""

from __future__ import annotations

from typing import Any

from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, SAME_AS, Family

_SHARED = ExpertNames(shared="shared_experts")
_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
_BIASED = ExpertsFamily(names=_SHARED, scores="sigmoid", correction_bias=True, group_best=2, float32=True)

SAME_AS["kimi_k2"] = "deepseek_v3"
FAMILIES |= {
    "deepseek_v2": Family(
        title="DeepSeek V2, V2-Lite, V2.5",
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
        },
        latent=True,
        experts=ExpertsFamily(names=_SHARED, float32=True),
    ),
    "deepseek_v3": Family(
        title="DeepSeek V3, R1, Kimi K2",
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        latent=True,
        mlp_bias=False,
        experts=_BIASED,
    ),
    "youtu": Family(
        title="Youtu-LLM",
        defaults=_DEFAULTS | {"max_position_embeddings": 131_072, "tie_word_embeddings": True},
        latent=True,
        mlp_bias=False,
    ),
    "glm4_moe_lite": Family(
        title="GLM-4.7-Flash",
        defaults=_DEFAULTS
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202_752,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
        },
        latent=True,
        mlp_bias=False,
        experts=_BIASED,
    ),
}

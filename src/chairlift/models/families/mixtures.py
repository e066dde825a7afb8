"""Families whose feed-forward blocks are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, TEXT_PARTS, Family, upper_layers
from chairlift.models.fields import Fields

_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_MINIMAX_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2", correction_bias="e_score_correction_bias")
_GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
)
_SHARED_EXPERTS = ExpertNames(shared="shared_experts")
_ERNIE_EXPERTS = ExpertNames(
    shared="shared_experts", correction_bias="moe_statics.e_score_correction_bias", correction_bias_is_row=True
)
_QWEN2_EXPERTS = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")


def _ernie_layers(fields: Fields, index: int) -> bool:
    last = fields.raw("moe_layer_end_index")
    last = fields.integer("num_hidden_layers") - 1 if last in (None, -1) else fields.integer("moe_layer_end_index")
    first, every = fields.integer("moe_layer_start_index", low=0), fields.integer("moe_layer_interval")
    return first <= index <= last and (index + 1) % every == 0


FAMILIES |= {
    "dots1": Family(
        title="dots.llm1",
        defaults={
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
        },
        qk_norm="head",
        windowed=upper_layers,
        experts=ExpertsFamily(
            names=_SHARED_EXPERTS, scores="sigmoid", correction_bias=True, group_best=2, float32=True
        ),
    ),
    "ernie4_5_moe": Family(
        title="Ernie 4.5 MoE",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "norm_topk_prob": True,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        interleaved_rope=True,
        experts=ExpertsFamily(
            names=_ERNIE_EXPERTS,
            correction_bias=True,
            float32=True,
            has_experts=_ernie_layers,
            top_k_key="moe_k",
        ),
    ),
    "glm4_moe": Family(
        title="GLM-4.5, GLM-4.6",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        output_bias=False,
        qk_norm="head",
        qk_norm_switch="use_qk_norm",
        experts=ExpertsFamily(
            names=_SHARED_EXPERTS, scores="sigmoid", correction_bias=True, group_best=2, float32=True
        ),
    ),
    "granitemoe": Family(
        title="Granite 3 MoE",
        defaults={
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        experts=ExpertsFamily(names=_GRANITE_EXPERTS),
    ),
    "minimax_m2": Family(
        title="MiniMax-M2",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196_608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        qkv_bias=False,
        output_bias=False,
        qk_norm="full",
        experts=ExpertsFamily(names=_MINIMAX_EXPERTS, scores="sigmoid", correction_bias=True),
    ),
    "olmoe": Family(
        title="OLMoE",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        qk_norm="full",
        experts=ExpertsFamily(),
    ),
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
TEXT_PARTS |= {
    "glm4v_moe_text": replace(
        FAMILIES["glm4_moe"],
        title="GLM-4.5V",
        defaults=dict(FAMILIES["glm4_moe"].defaults) | {"max_position_embeddings": 65_536, "attention_bias": True},
    ),
    "qwen3_vl_moe_text": replace(
        FAMILIES["qwen3_moe"],
        title="Qwen3-VL-MoE",
        defaults=dict(FAMILIES["qwen3_moe"].defaults) | {"norm_topk_prob": True},
        experts=ExpertsFamily(names=ExpertNames(transposed=True)),
    ),
}

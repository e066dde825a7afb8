"""Families with recurrent layers, most of them beside attention."""

from __future__ import annotations

from typing import Any

from chairlift.models.config import NormNames, PartNames
from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, Family, not_rotated
from chairlift.models.fields import Fields
from chairlift.models.recurrent import (
    RecurrentFamily,
    both_blocks,
    gated_delta,
    indexed_blocks,
    kimi_blocks,
    kimi_delta,
    listed_blocks,
    mamba2,
    mamba2_of_falcon,
    mamba2_of_hybrids,
    mamba2_of_nemotron,
    nemotron_blocks,
    only_recurrent_blocks,
    short_convolution,
    single_blocks,
)

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

_MAMBA2_NAMES = PartNames(recurrent="mixer", final_norm="norm_f")
_ONE_NORM = NormNames("norm", None, "norm", None)
_BAMBA_NAMES = PartNames(recurrent="mamba", mlp="feed_forward", final_norm="final_layernorm")
_BAMBA_NORMS = NormNames("input_layernorm", None, "pre_ff_layernorm", None)
_BAMBA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    shared="shared_mlp",
    shared_is_outside=True,
    shared_inner=("input_linear",),
    shared_down="output_linear",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
)
_NEMOTRON_EXPERTS = ExpertNames(
    "mixer", gate=None, shared="shared_experts", shared_inner=("up_proj",), stacked_gate_up="experts.up_proj"
)
_LFM2_EXPERTS = ExpertNames("feed_forward", "w1", "w3", "w2", correction_bias="expert_bias")
_KIMI_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2", shared="shared_experts")
_LFM2_NAMES = PartNames(
    output="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    inner=("w1", "w3"),
    down="w2",
    recurrent="conv",
    final_norm="embedding_norm",
)

_LFM2_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
_LFM2: dict[str, Any] = {
    "aliases": {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    "names": _LFM2_NAMES,
    "norms": NormNames("operator_norm", None, "ffn_norm", None),
    "eps_key": "norm_eps",
    "qk_norm": "head",
    "recurrent": RecurrentFamily(short_convolution, indexed_blocks),
}


def _rotated_if_asked(fields: Fields, index: int, layer_type: str) -> bool:
    return bool(fields.raw("position_embedding_type") == "rope")


def _granite_size(fields: Fields) -> int:
    """Of the block that Granite 4 has beside its experts, or instead of them."""
    return fields.integer("shared_intermediate_size")


def _nemotron_experts(fields: Fields, index: int) -> bool:
    return nemotron_blocks(fields)[index] == "moe"


def _upper_layers(fields: Fields, index: int) -> bool:
    return index >= fields.integer("num_dense_layers", low=0)


def _lfm2_size(fields: Fields) -> int:
    """Two thirds of the given size, rounded up, unless the config says that it is the size itself."""
    size = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in fields:
        size, multiple = int(fields.number("block_ffn_dim_multiplier") * size), fields.integer("block_multiple_of")
        size = -(-size // multiple) * multiple
    return size


FAMILIES |= {
    "mamba2": Family(
        title="Mamba 2",
        defaults={
            "max_position_embeddings": 2**20,  # it has no limit of its own
            "n_groups": 8,
            "state_size": 128,
            "head_dim": 64,
            "num_heads": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
        },
        names=_MAMBA2_NAMES,
        norms=_ONE_NORM,
        eps_key="layer_norm_epsilon",
        recurrent=RecurrentFamily(mamba2, only_recurrent_blocks),
    ),
    "bamba": Family(
        title="Bamba",
        defaults=_BAMBA_DEFAULTS | {"partial_rotary_factor": 0.5},
        names=_BAMBA_NAMES,
        norms=_BAMBA_NORMS,
        recurrent=RecurrentFamily(mamba2_of_hybrids, indexed_blocks),
    ),
    "granitemoehybrid": Family(
        title="Granite 4",
        defaults=_BAMBA_DEFAULTS
        | {
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-6,
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "shared_intermediate_size": 1024,
        },
        names=PartNames(recurrent="mamba", mlp="shared_mlp", inner=("input_linear",), down="output_linear"),
        mlp_bias=False,
        rotated=_rotated_if_asked,
        inner_size=_granite_size,
        experts=ExpertsFamily(names=_GRANITE_EXPERTS),
        recurrent=RecurrentFamily(mamba2_of_hybrids, indexed_blocks),
    ),
    "falcon_h1": Family(
        title="Falcon-H1",
        defaults=_BAMBA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "ssm_multipliers": [1.0] * 5,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        names=_BAMBA_NAMES,
        norms=_BAMBA_NORMS,
        recurrent=RecurrentFamily(mamba2_of_falcon, both_blocks),
    ),
    "nemotron_h": Family(
        title="Nemotron-H",
        defaults={
            "mlp_hidden_act": "relu2",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        names=PartNames(attention="mixer", recurrent="mixer", mlp="mixer", inner=("up_proj",), final_norm="norm_f"),
        norms=_ONE_NORM,
        eps_key="layer_norm_epsilon",
        activation_key="mlp_hidden_act",
        gated_mlp=False,
        rotated=not_rotated,
        experts=ExpertsFamily(
            names=_NEMOTRON_EXPERTS,
            scores="sigmoid",
            correction_bias=True,
            group_best=2,
            float32=True,
            has_experts=_nemotron_experts,
        ),
        recurrent=RecurrentFamily(mamba2_of_nemotron, single_blocks),
    ),
    "kimi_linear": Family(
        title="Kimi-Linear",
        defaults={
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        aliases={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        names=PartNames(recurrent="self_attn"),
        latent=True,
        mlp_bias=False,
        rotated=not_rotated,
        experts=ExpertsFamily(names=_KIMI_EXPERTS, scores="sigmoid", correction_bias=True, group_best=2, float32=True),
        recurrent=RecurrentFamily(kimi_delta, kimi_blocks),
    ),
    "lfm2": Family(
        title="LFM2",
        defaults=_LFM2_DEFAULTS
        | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
        inner_size=_lfm2_size,
        **_LFM2,
    ),
    "lfm2_moe": Family(
        title="LFM2-MoE",
        defaults=_LFM2_DEFAULTS | {"num_dense_layers": 2, "norm_topk_prob": True, "use_expert_bias": True},
        experts=ExpertsFamily(
            names=_LFM2_EXPERTS,
            scores="sigmoid",
            correction_bias="use_expert_bias",
            normalize_eps=1e-6,
            has_experts=_upper_layers,
        ),
        **_LFM2,
    ),
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

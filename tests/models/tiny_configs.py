"""A tiny config for any causal model type of transformers: `tiny_config("qwen3_next")`.

The one place for tiny sizes: every field that a config class has and that is named in `TINY` gets the value there, also
in nested configs (`text_config`). What a family needs beyond that is in `SPECIAL`, which may name any field of its
class. Tests may change single fields: `tiny_config("qwen2", use_sliding_window=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB = 211
POSITIONS = 128
LAYERS = 4  # two of each kind in models that alternate

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": POSITIONS,
    "n_ctx": POSITIONS,
    "model_max_length": POSITIONS,
    # the residual stream and its feed-forward blocks
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "attention_head_dim": 16,
    "swa_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "global_head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": 9,
    "sliding_window_size": 9,
    "attention_window_size": 9,
    "attention_chunk_size": 24,
    "max_window_layers": 2,
    "query_pre_attn_scalar": 20,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    # sparse attention
    "index_topk": 8,
    "index_n_heads": 16,  # With few heads, scores are often zero in all of them, and ties have no order.
    "index_head_dim": 16,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "expert_dim": 24,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "zero_expert_num": 2,
    "router_hidden_size": 16,
    # recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_ngroups": 1,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 32,
    "n_groups": 2,
    "n_mamba_heads": 2,
    "ssm_state_size": 16,
    "state_size": 16,
    "chunk_size": 32,
    "time_step_rank": 8,
    "time_step_min": 1e-6,  # by which transformers limits the time steps of Nemotron-H
    "lru_width": 64,
    # encoders
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}

# The heads of latent attention have a part that is rotated and all their own keys; `head_dim` is the rotated part.
LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
_GEMMA3N: dict[str, Any] = {
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "intermediate_size": 96,
}
_HYBRID: dict[str, Any] = {"layer_types": [LINEAR, FULL, LINEAR, FULL]}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}  # with a tied head these repeat one token
# By model type: fields in the place of those in TINY. None leaves the field to its class.
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bloom": UNTIED,
    "cohere": {"logit_scale": 0.8},
    "cohere2": {"logit_scale": 0.8},
    "cohere2_moe": {"logit_scale": 0.8},
    "cpmant": {"dim_ff": 96, "dim_head": 16, "segment_types": 4, "prompt_types": 4},
    "ctrl": {"dff": 96} | UNTIED,
    "dots1": {"n_shared_experts": 1},
    "falcon": {"new_decoder_architecture": True, "alibi": False},
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "granite": {"logits_scaling": 0.5, "attention_multiplier": 0.4, "residual_multiplier": 0.7},
    "granitemoehybrid": _HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 16, "num_key_value_heads": 2},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4, "q_lora_rank": None} | _HYBRID,
    "lfm2": {"layer_types": ["conv", FULL, "conv", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv", FULL]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "minimax": _HYBRID | {"block_size": 8},
    "nemotron_h": {"hybrid_override_pattern": "M*-E"},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xglm": UNTIED,
    "xlnet": {"d_head": 16, "d_inner": 96},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"pad_token_id": None},  # transformers clears the row of this token when it loads a checkpoint
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A tiny config of transformers for a model type, with some fields changed."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**tiny_fields(config_class, SPECIAL.get(model_type, {}) | changes))


def tiny_fields(config_class: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TINY that a config class has, with tiny nested configs, and `changes`."""
    known = _field_names(config_class)
    changes = (LATENT if "qk_rope_head_dim" in known else {}) | dict(changes)
    values = {name: value for name, value in (TINY | changes).items() if name in known and value is not None}
    values |= {name: value for name, value in changes.items() if value is not None}
    for name, nested in (config_class.sub_configs or {}).items():
        if name not in changes and hasattr(nested, "sub_configs"):
            values[name] = tiny_fields(nested, SPECIAL.get(nested.model_type, {}))
    return values


def _field_names(config_class: Any) -> set[str]:
    from dataclasses import fields

    return {field.name for field in fields(config_class)} | set(config_class.attribute_map)

"""Families with layer norms instead of root-mean-square norms."""

from __future__ import annotations

from typing import Any

from chairlift.models.config import PartNames
from chairlift.models.families.base import (
    FAMILIES,
    Family,
    all_but_every_nth,
    rotated_only_in_windows,
)

_COHERE: dict[str, Any] = {
    "norm_kind": "layer",
    "eps_key": "layer_norm_eps",
    "parallel_block": True,
    "interleaved_rope": True,
}
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}

FAMILIES |= {
    "cohere": Family(
        title="Command R",
        defaults=_COHERE_DEFAULTS | {"rope_theta": 5e5},
        qk_norm="each",
        qk_norm_switch="use_qk_norm",
        **_COHERE,
    ),
    "cohere2": Family(
        title="Command R7B, Command A",
        defaults=_COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        windowed=all_but_every_nth,
        rotated=rotated_only_in_windows,
        **_COHERE,
    ),
    "nemotron": Family(
        title="Nemotron 3, Nemotron 4, Minitron",
        defaults={
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
        },
        names=PartNames(inner=("up_proj",)),
        norm_kind="layer",
        norm_bias=True,
        norm_unit_offset=True,
        eps_key="norm_eps",
        gated_mlp=False,
    ),
    "phi": Family(
        title="Phi-1, Phi-2",
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
        names=PartNames(
            output="dense",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            inner=("fc1",),
            down="fc2",
            final_norm="final_layernorm",
        ),
        norm_kind="layer",
        norm_bias=True,
        eps_key="layer_norm_eps",
        qk_norm="head",
        qk_norm_switch="qk_layernorm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated_mlp=False,
        parallel_block=True,
    ),
    "stablelm": Family(
        title="StableLM",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        names=PartNames(q_norm="q_layernorm.norms.{}", k_norm="k_layernorm.norms.{}"),
        norm_kind="layer",
        norm_bias=True,
        eps_key="layer_norm_eps",
        qk_norm="each",
        qk_norm_switch="qk_layernorm",
        qkv_bias="use_qkv_bias",
        output_bias=False,
        mlp_bias=False,
        parallel_block="use_parallel_residual",
    ),
    "starcoder2": Family(
        title="StarCoder 2",
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        names=PartNames(inner=("c_fc",), down="c_proj"),
        norm_kind="layer",
        norm_bias=True,
        eps_key="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        gated_mlp=False,
    ),
}

"""Llama and families close to it."""

from __future__ import annotations

from chairlift.models.config import POST_NORMS, NormNames, PartNames
from chairlift.models.families.base import (
    FAMILIES,
    Family,
    all_but_every_nth,
    rotated_by_list,
    rotated_in_windows,
)
from chairlift.models.fields import Fields


def _layers_without_rope(config: Fields, index: int) -> bool:
    return not rotated_by_list(config, index, "")


_EXAONE_PATTERN = {"sliding_window": 4096, "sliding_window_pattern": 4}

FAMILIES |= {
    "llama": Family(title="Llama 2, Llama 3, SmolLM2", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(title="Mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(
        title="Ministral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    ),
    "ministral3": Family(
        title="Ministral 3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granite": Family(
        title="Granite 3",
        defaults={"max_position_embeddings": 2048, "attention_multiplier": 1.0},
    ),
    "arcee": Family(
        title="Arcee",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        names=PartNames(inner=("up_proj",)),
        gated_mlp=False,
    ),
    "apertus": Family(
        title="Apertus",
        defaults={
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-5,
            "hidden_act": "xielu",
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        names=PartNames(inner=("up_proj",)),
        norms=NormNames("attention_layernorm", None, "feedforward_layernorm", None),
        qk_norm="head",
        gated_mlp=False,
    ),
    "ernie4_5": Family(
        title="Ernie 4.5",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        interleaved_rope=True,
    ),
    "exaone4": Family(
        title="EXAONE 4",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5} | _EXAONE_PATTERN,
        norms=POST_NORMS,
        qk_norm="head",
        qkv_bias=False,
        output_bias=False,
        windowed=all_but_every_nth,
        rotated=rotated_in_windows,
    ),
    "helium": Family(
        title="Helium",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
        },
        output_bias=False,
        interleaved_rope=True,
    ),
    "hunyuan_v1_dense": Family(
        title="Hunyuan",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        names=PartNames(q_norm="query_layernorm", k_norm="key_layernorm"),
        qk_norm="head",
        qk_norm_after_rope=True,
    ),
    "seed_oss": Family(
        title="Seed-OSS",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524_288,
            "attention_bias": True,
        },
        output_bias="attention_out_bias",
    ),
    "smollm3": Family(
        title="SmolLM3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        windowed=_layers_without_rope,
        window_switch=True,
    ),
}

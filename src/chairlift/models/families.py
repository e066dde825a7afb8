"""The model families, each described by its differences from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.errors import CorruptCheckpoint
from chairlift.models.config import POST_NORMS, PRE_NORMS, SANDWICH_NORMS, NormNames
from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.fields import Fields
from chairlift.registry import load_plugins


def _every_layer(config: Fields, index: int) -> bool:
    return True


def _upper_layers(config: Fields, index: int) -> bool:
    return index >= config.integer("max_window_layers", low=0)


def _all_but_every_nth(config: Fields, index: int) -> bool:
    return (index + 1) % config.integer("sliding_window_pattern") != 0


def has_rope(fields: Fields, index: int) -> bool:
    """SmolLM3 has no rotation in some layers: where `no_rope_layers` is 0, or in every nth."""
    if "no_rope_layers" in fields:
        marks = fields.items("no_rope_layers", int)
        if len(marks) <= index:
            raise CorruptCheckpoint(f"config.json: no_rope_layers has {len(marks)} entries, layer {index} has none")
        return bool(marks[index])
    interval = fields.optional_integer("no_rope_layer_interval")
    return interval is None or (index + 1) % interval != 0


def _layers_without_rope(config: Fields, index: int) -> bool:
    return not has_rope(config, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from Llama. `defaults` are values that its config files may leave out."""

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: NormNames = PRE_NORMS
    norm_unit_offset: bool = False
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias_only: bool = False  # if queries, keys and values have biases, the output still has none
    fused_names: bool = False
    scaled_embeddings: bool = False
    activation_key: str = "hidden_act"
    # Which layers have the sliding window if the config has one but no list of layer types.
    windowed: Callable[[Fields, int], bool] = _every_layer
    window_switch: bool = False  # the window only counts if use_sliding_window is true
    experts: ExpertsFamily | None = None


_GEMMA: dict[str, Any] = {
    "norms": SANDWICH_NORMS,
    "norm_unit_offset": True,
    "scaled_embeddings": True,
    "activation_key": "hidden_activation",
    "windowed": _all_but_every_nth,
}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_QWEN2_EXPERTS = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")

# By the model_type of config.json. A plugin adds its own: FAMILIES["name"] = Family(...).
FAMILIES: dict[str, Family] = {
    "llama": Family(title="Llama 2, Llama 3, SmolLM2", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(title="Mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
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
    "qwen2": Family(
        title="Qwen2, Qwen2.5",
        defaults={"max_window_layers": 28, "sliding_window": 4096, "qkv_bias": True},
        qkv_bias_only=True,
        windowed=_upper_layers,
        window_switch=True,
    ),
    "qwen2_moe": Family(
        title="Qwen2-MoE",
        defaults={"max_window_layers": 28, "sliding_window": 4096, "decoder_sparse_step": 1, "qkv_bias": True},
        qkv_bias_only=True,
        windowed=_upper_layers,
        window_switch=True,
        experts=ExpertsFamily(names=_QWEN2_EXPERTS),
    ),
    "qwen3": Family(
        title="Qwen3",
        defaults={"head_dim": 128, "max_window_layers": 28, "sliding_window": 4096},
        qk_norm="head",
        windowed=_upper_layers,
        window_switch=True,
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        defaults={"sliding_window": 4096, "decoder_sparse_step": 1},
        qk_norm="head",
        window_switch=True,
        experts=ExpertsFamily(),
    ),
    "smollm3": Family(
        title="SmolLM3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        windowed=_layers_without_rope,
        window_switch=True,
    ),
    "phi3": Family(
        title="Phi-3",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        fused_names=True,
    ),
    "gemma2": Family(
        title="Gemma 2",
        defaults=_GEMMA_DEFAULTS
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
        defaults=_GEMMA_DEFAULTS
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
    "olmo2": Family(
        title="OLMo 2",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        norms=POST_NORMS,
        qk_norm="full",
    ),
}


def find_family(model_type: object) -> Family | None:
    """The family of this name, also from plugins."""
    load_plugins()
    return FAMILIES.get(str(model_type))

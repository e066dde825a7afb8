"""What describes a model family: its differences from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.errors import CorruptCheckpoint
from chairlift.layers.rope import QueryScaling
from chairlift.models.config import LLAMA_NAMES, PRE_NORMS, NormNames, PartNames, QKNorm
from chairlift.models.experts import ExpertsFamily
from chairlift.models.fields import Fields
from chairlift.models.recurrent import RecurrentFamily
from chairlift.registry import load_plugins


def every_layer(config: Fields, index: int) -> bool:
    return True


def upper_layers(config: Fields, index: int) -> bool:
    return index >= config.integer("max_window_layers", low=0)


def all_but_every_nth(config: Fields, index: int) -> bool:
    return (index + 1) % config.integer("sliding_window_pattern") != 0


def rotated_by_list(fields: Fields, index: int, layer_type: str) -> bool:
    """SmolLM3 has no rotation in some layers: where `no_rope_layers` is 0, or in every nth."""
    if "no_rope_layers" in fields:
        marks = fields.items("no_rope_layers", int)
        if marks and len(marks) <= index:
            raise CorruptCheckpoint(f"config.json: no_rope_layers has {len(marks)} entries, layer {index} has none")
        if marks:
            return bool(marks[index])
    interval = fields.optional_integer("no_rope_layer_interval")
    return interval is None or (index + 1) % interval != 0


def rotated_in_windows(fields: Fields, index: int, layer_type: str) -> bool:
    """Layers with full attention have no rotation if others have a window."""
    return layer_type == "sliding_attention" or "sliding_window" not in fields


def rotated_only_in_windows(fields: Fields, index: int, layer_type: str) -> bool:
    """Layers with full attention have no rotation."""
    return layer_type == "sliding_attention"


def intermediate_size(fields: Fields) -> int:
    return fields.integer("intermediate_size")


def not_rotated(fields: Fields, index: int, layer_type: str) -> bool:
    return False


def no_scaling(fields: Fields) -> QueryScaling | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from Llama. `defaults` are values that its config files may leave out.

    Where a config switches something on and off, the field of the family is the name of the config's flag.
    """

    title: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # flags of its configs: a model with one of them runs on transformers' code
    aliases: Mapping[str, str] = field(default_factory=dict)  # the config's own names of fields -> the usual ones
    names: PartNames = LLAMA_NAMES
    norms: NormNames = PRE_NORMS
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_unit_offset: bool = False
    eps_key: str = "rms_norm_eps"
    qk_norm: QKNorm | None = None
    qk_norm_switch: str | None = None  # `qk_norm` only counts if this flag is true
    qk_norm_after_rope: bool = False
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    head_bias: bool = False
    gated_mlp: bool = True
    inner_size: Callable[[Fields], int] = intermediate_size  # Dense feed-forward blocks have this size.
    parallel_block: str | bool = False  # then one norm is in front of both blocks
    gated_attention: bool = False
    v_norm: bool = False
    layer_scalars: bool = False
    scaled_embeddings: bool = False
    activation_key: str = "hidden_act"
    # Which layers have the sliding window if the config has one but no list of layer types.
    windowed: Callable[[Fields, int], bool] = every_layer
    window_switch: bool = False  # the window only counts if use_sliding_window is true
    rotated: Callable[[Fields, int, str], bool] = rotated_by_list
    interleaved_rope: bool = False
    scales_local_rope: bool = True  # rope_scaling also counts in layers with a sliding window
    latent: bool = False  # latent attention
    sinks: bool = False  # attention has learned sinks
    chunked: bool = False  # the attention of layers with rotation stays within chunks of attention_chunk_size
    query_scaling: Callable[[Fields], QueryScaling | None] = no_scaling  # Layers without rotation have it.
    experts: ExpertsFamily | None = None
    recurrent: RecurrentFamily | None = None


# By the model_type of config.json. A plugin adds its own: FAMILIES["name"] = Family(...).
FAMILIES: dict[str, Family] = {}
# Families that only exist as the text part of a larger model.
TEXT_PARTS: dict[str, Family] = {}
# Model types that are another name of a family: transformers does not have them, or not as language models.
SAME_AS: dict[str, str] = {}


def find_family(model_type: object) -> Family | None:
    """The family of this name, also from plugins."""
    load_plugins()
    name = SAME_AS.get(str(model_type), str(model_type))
    return FAMILIES.get(name) or TEXT_PARTS.get(name)

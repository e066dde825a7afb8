"""Recurrent layers as a config describes them: which blocks each layer has, and the sizes of the recurrent ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.recurrent.base import GateOrder, RecurrentShape
from chairlift.layers.recurrent.gated_delta import GatedDeltaShape, KimiDeltaShape
from chairlift.layers.recurrent.mamba2 import Mamba2Shape
from chairlift.layers.recurrent.short_convolution import ShortConvolutionShape
from chairlift.models.fields import LARGEST, MAX_LAYERS, Fields

_WHERE = "config.json"


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer."""

    attention: bool = False
    recurrent: bool = False
    mlp: bool = True


@dataclass(frozen=True, slots=True)
class RecurrentFamily:
    """The recurrent layers of a family: their sizes, and where they are."""

    shape: Callable[[Fields], RecurrentShape]
    blocks: Callable[[Fields], list[LayerBlocks]]


_ATTENTION, _RECURRENT = LayerBlocks(attention=True), LayerBlocks(recurrent=True)
_BY_TYPE = {
    "full_attention": _ATTENTION,
    "attention": _ATTENTION,
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
    "conv": _RECURRENT,
}


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=MAX_LAYERS)


def listed_blocks(fields: Fields) -> list[LayerBlocks]:
    """By `layer_types`, or attention in every nth layer."""
    count = _num_layers(fields)
    if "layer_types" not in fields:
        interval = fields.integer("full_attention_interval")
        return [_RECURRENT if (index + 1) % interval else _ATTENTION for index in range(count)]
    types = fields.items("layer_types", str, length=count)
    for layer_type in types:
        if layer_type not in _BY_TYPE:
            raise UnsupportedModel(f"layer type {layer_type!r} is not supported in this family")
    return [_BY_TYPE[layer_type] for layer_type in types]


def indexed_blocks(fields: Fields) -> list[LayerBlocks]:
    """Attention in the layers that the config numbers; or by `layer_types`."""
    if "layer_types" in fields:
        return listed_blocks(fields)
    key = "attn_layer_indices" if "attn_layer_indices" in fields else "full_attn_idxs"
    attention = fields.items(key, int)
    return [_ATTENTION if i in attention else _RECURRENT for i in range(_num_layers(fields))]


def both_blocks(fields: Fields) -> list[LayerBlocks]:
    return [LayerBlocks(attention=True, recurrent=True)] * _num_layers(fields)


def only_recurrent_blocks(fields: Fields) -> list[LayerBlocks]:
    return [LayerBlocks(recurrent=True, mlp=False)] * _num_layers(fields)


def single_blocks(fields: Fields) -> list[LayerBlocks]:
    """Nemotron-H: every layer is one block."""
    by_type = {
        "full_attention": LayerBlocks(attention=True, mlp=False),
        "linear_attention": LayerBlocks(recurrent=True, mlp=False),
        "mlp": LayerBlocks(),
        "moe": LayerBlocks(),
    }
    return [by_type[block] for block in nemotron_blocks(fields)]


def nemotron_blocks(fields: Fields) -> list[str]:
    """The kind of each layer, from a list or a pattern such as M-M*-."""
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    names = {"mamba": "linear_attention", "attention": "full_attention"} | {name: name for name in letters.values()}
    if "layers_block_type" in fields:
        blocks, types = fields.items("layers_block_type", str), names
    else:
        blocks, types = list(fields.text("hybrid_override_pattern")), letters
    for block in blocks:
        if block not in types:
            raise UnsupportedModel(f"layer type {block!r} is not supported in this family")
    return [types[block] for block in blocks]


def gated_delta(fields: Fields, *, by_key_head: bool = False) -> GatedDeltaShape:
    key_heads, heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    _check_groups("linear_num_value_heads", heads, "linear_num_key_heads", key_heads)
    return GatedDeltaShape(
        key_heads=key_heads,
        heads=heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        width=fields.integer("linear_conv_kernel_dim", low=2),
        by_key_head=by_key_head,
    )


def gated_delta_by_key_head(fields: Fields) -> GatedDeltaShape:
    return gated_delta(fields, by_key_head=True)


def kimi_delta(fields: Fields) -> KimiDeltaShape:
    """From the fields of transformers, or from the section that published checkpoints have."""
    section = Fields(fields.section("linear_attn_config"), {}, "linear_attn_config in config.json")

    def number(ours: str, theirs: str, low: int = 1) -> int:
        return section.integer(theirs, low=low) if theirs in section else fields.integer(ours, low=low)

    return KimiDeltaShape(
        heads=number("linear_num_heads", "num_heads"),
        head_dim=number("linear_head_dim", "head_dim"),
        width=number("linear_conv_kernel_dim", "short_conv_kernel_size", low=2),
    )


def kimi_blocks(fields: Fields) -> list[LayerBlocks]:
    """By `layer_types`, or by the numbers of layers, from 1 on, that published checkpoints have."""
    section = Fields(fields.section("linear_attn_config"), {}, "linear_attn_config in config.json")
    if "layer_types" in fields or "full_attn_layers" not in section:
        return listed_blocks(fields)
    attention = section.items("full_attn_layers", int)
    return [_ATTENTION if i + 1 in attention else _RECURRENT for i in range(_num_layers(fields))]


def short_convolution(fields: Fields) -> ShortConvolutionShape:
    return ShortConvolutionShape(
        channels=fields.integer("hidden_size"),
        width=fields.integer("conv_L_cache", low=2),
        bias=fields.flag("conv_bias"),
    )


def mamba2(
    fields: Fields,
    order: GateOrder = GateOrder(first=True),
    scales: tuple[float, float, float, float, float] | None = None,
) -> Mamba2Shape:
    """Under Bamba's names; as in NVIDIA's code, `time_step_min` is only for starting a training."""
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    _check_groups("the heads of the recurrent layers", heads, "their groups", groups)
    bias = fields.flag("mamba_proj_bias")
    return Mamba2Shape(
        groups=groups,
        heads=heads,
        state_size=fields.integer("mamba_d_state"),
        head_dim=fields.integer("mamba_d_head"),
        width=fields.integer("mamba_d_conv", low=2),
        convolution_bias=fields.flag("mamba_conv_bias"),
        input_bias=bias,
        output_bias=bias,
        step_limits=_step_limits(fields),
        order=order,
        scales=scales,
    )


def mamba2_of_hybrids(fields: Fields, **more: Any) -> Mamba2Shape:
    """Bamba and Granite 4, whose configs may leave out the size of a head."""
    heads, stated = fields.integer("mamba_n_heads"), fields.raw("mamba_d_head")
    size = fields.optional_integer("mamba_d_ssm") or fields.integer("mamba_expand") * fields.integer("hidden_size")
    head_dim = size // heads if stated in (None, "auto") else fields.integer("mamba_d_head")
    if head_dim * heads != size:
        raise CorruptCheckpoint(f"{_WHERE}: mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) is not {size}")
    return mamba2(fields.updated({"mamba_d_head": head_dim}), **more)


def mamba2_of_falcon(fields: Fields) -> Mamba2Shape:
    """Falcon-H1: a norm or none, and multipliers of every projection."""
    if fields.flag("mamba_proj_bias") or fields.flag("projectors_bias"):
        raise UnsupportedModel("mamba_proj_bias and projectors_bias are not supported in this family")
    scale = fields.number("ssm_in_multiplier")
    z, x, b, c, step = (scale * float(each) for each in fields.items("ssm_multipliers", (int, float), length=5))
    multipliers = (z, x, b, c, step)
    order = GateOrder(
        norm=fields.flag("mamba_rms_norm"),
        first=not fields.flag("mamba_norm_before_gate"),
        scale=fields.number("ssm_out_multiplier"),
    )
    scales = None if set(multipliers) == {1.0} else multipliers
    return mamba2_of_hybrids(fields, order=order, scales=scales)


def _step_limits(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`, whose second number usually is Infinity: as JSON has it, or as an object of transformers."""
    if "time_step_limit" not in fields:
        return 0.0, math.inf
    low, high = (
        math.inf if limit == {"__float__": "Infinity"} else limit
        for limit in fields.items("time_step_limit", (int, float, dict), length=2)
    )
    if isinstance(low, dict) or isinstance(high, dict) or not (0.0 <= low <= LARGEST and low < high):
        raise CorruptCheckpoint(f"{_WHERE}: time_step_limit must be two numbers, the first below the second")
    return float(low), float(high)


def _check_groups(name: str, heads: int, group_name: str, groups: int) -> None:
    if heads % groups:
        raise CorruptCheckpoint(f"{_WHERE}: {name} ({heads}) must be a multiple of {group_name} ({groups})")

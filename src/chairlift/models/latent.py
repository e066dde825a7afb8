"""Latent attention (MLA) as a config describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chairlift.attention.interface import AttentionLayer
from chairlift.errors import UnsupportedModel
from chairlift.layers.latent_attention import LatentShape
from chairlift.models.fields import Fields
from chairlift.models.rope_config import ROPE_SETTINGS

MAX_DIM = 2**14


def read_latent(fields: Fields) -> LatentShape:
    """The sizes of latent attention, under DeepSeek's names."""
    if "index_topk" in fields:
        raise UnsupportedModel("index_topk: sparse attention, in which a small network chooses keys, is not supported")
    if fields.raw("use_mla") is False:
        raise UnsupportedModel("use_mla is false: in this family attention without latents is not supported")
    sizes = {
        name: fields.integer(key, high=MAX_DIM)
        for name, key in (
            ("rank", "kv_lora_rank"),
            ("nope_dim", "qk_nope_head_dim"),
            ("rope_dim", "qk_rope_head_dim"),
            ("value_dim", "v_head_dim"),
        )
    }
    q_rank = fields.integer("q_lora_rank", high=2**17) if "q_lora_rank" in fields else None
    return LatentShape(
        q_rank=q_rank,
        bias=fields.flag("attention_bias"),
        interleaved_rope=fields.flag("rope_interleave"),
        **sizes,
    )


def latent_layer(shape: LatentShape, fields: Fields, rope: Mapping[str, Any], index: int) -> AttentionLayer:
    """A layer as its cache sees it: one head of keys, whose first numbers are the values."""
    return AttentionLayer(
        index=index,
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=shape.rank + shape.rope_dim,
        scale=(shape.nope_dim + shape.rope_dim) ** -0.5 * _yarn_scale(Fields(rope, {}, ROPE_SETTINGS)) ** 2,
        latent_dim=shape.rank,
    )


def _yarn_scale(rope: Fields) -> float:
    """The part of yarn's attention factor that also multiplies the dimensions without rotation."""
    factor = rope.optional_number("factor") or 1.0
    if not rope.raw("mscale_all_dim") or factor <= 1:
        return 1.0
    if (rope.raw("rope_type") or rope.raw("type") or "default") == "default":
        return 1.0
    return 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0

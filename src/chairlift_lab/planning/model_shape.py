"""A model's costs from its config, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.settings import KV_DTYPES
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.resolve import resolve_model
from chairlift.models import describe
from chairlift.models.base import ModelInfo
from chairlift_lab.simulator.roofline import ModelShape

BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}


def read_config(name: str) -> Mapping[str, Any]:
    """Read the config of a config.json, a folder, a GGUF file, a known model or a shape of `bench shapes`."""
    from chairlift_lab.common.model_shapes import SHAPES, read_json_config

    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    if (path / "config.json").exists() or (path.suffix == ".json" and path.exists()):
        return read_json_config(path, "model")
    return open_checkpoint(resolve_model(name)).config


def model_shape(config: Mapping[str, Any], weights: str, kv_dtype: str) -> tuple[ModelShape, ModelInfo]:
    """The shape of a model with weights and a KV cache of these types."""
    for parameter, name, known in (("dtype", weights, BYTES_PER_WEIGHT), ("kv_dtype", kv_dtype, KV_DTYPES)):
        if name not in known:
            raise InvalidParameter(parameter, f"unknown type {name!r}; choose from {', '.join(known)}")
    info = describe(config)
    layers = info.attention_layers
    shape = ModelShape(
        num_parameters=info.num_parameters,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        kv_bytes_per_token=bytes_per_token(layers, KV_DTYPES[kv_dtype]),
        attention_flops_per_kv=sum(2 * layer.num_heads * (layer.head_dim + layer.value_dim) for layer in layers),
        bytes_per_weight=BYTES_PER_WEIGHT[weights],
        tied_head=bool(config.get("tie_word_embeddings", False)),
        state_bytes=sum(layer.num_bytes for layer in info.recurrent_layers),
    )
    return shape, info

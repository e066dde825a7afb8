"""The dtype of the KV cache."""

from __future__ import annotations

import torch

from chairlift.config import EngineConfig
from chairlift.engine.machine_defaults import KV_DTYPES
from chairlift.errors import InvalidParameter
from chairlift.layers.formats.fp8 import FP8, fp8_obstacles
from chairlift.models.base import CausalLM


def kv_dtype(config: EngineConfig, model: CausalLM) -> torch.dtype:
    """The configured dtype; by default that of the model, or bfloat16 where the weights are int8 or bfloat16."""
    if config.kv_dtype == "auto":
        return model.kv_dtype
    check_kv_dtype(config.kv_dtype, model.dtype, model.device)
    return KV_DTYPES[config.kv_dtype]


def check_kv_dtype(name: str, model_dtype: torch.dtype, device: torch.device) -> None:
    """Raise if a model in `model_dtype` on `device` cannot have a KV cache of this dtype."""
    if name == "auto":
        return
    dtype = KV_DTYPES[name]
    if dtype is FP8:
        reasons = fp8_obstacles(device)
        if model_dtype is torch.float32:
            reasons.append("a model in float32 would lose most of what it computes")
        if reasons:
            raise InvalidParameter("kv_dtype", f"fp8 is not possible: {'; '.join(reasons)}")
    elif dtype is not model_dtype and (device.type != "cpu" or dtype is torch.float16):
        raise InvalidParameter("kv_dtype", f"{name} is not possible for a model in {model_dtype} on {device.type}")

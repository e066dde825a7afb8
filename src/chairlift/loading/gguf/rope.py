"""The RoPE settings of a GGUF file in Hugging Face's `rope_scaling` spelling.

One `rope_type` is our own: `frequency_factors`, whose `factors` [rotary_dim / 2] divide the inverse frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import corrupt
from chairlift.loading.gguf.metadata import Metadata


def rope_scaling(model: Metadata, rotary_dim: int) -> dict[str, Any] | None:
    tensors = model.file.tensors
    if "rope_freqs.weight" in tensors:
        return _named_or_explicit(model, _factors(model, "rope_freqs.weight", rotary_dim))
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(model, "rope_factors_long.weight", rotary_dim),
            "short_factor": _factors(model, "rope_factors_short.weight", rotary_dim),
            "original_max_position_embeddings": model.integer("rope.scaling.original_context_length"),
        }
    kind = model.string("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{model.file.path}: the RoPE scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": model.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = model.integer("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if model.has(f"rope.scaling.yarn_{key}"):
                scaling[key] = model.number(f"rope.scaling.yarn_{key}")
    return scaling


def _named_or_explicit(model: Metadata, factors: list[float]) -> dict[str, Any] | None:
    """Recover Llama 3's rope scaling, of which GGUF stores only one divisor per frequency.

    Every Llama 3.x so far has the same bounds and another factor; if those bounds reproduce the stored divisors, the
    scaling gets its name back. Otherwise the divisors are used as they are.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length", 8192),
    }
    theta = model.number("rope.freq_base", 10000.0)
    if np.allclose(factors, _llama3_factors(scaling, theta, len(factors))):
        return scaling
    return {"rope_type": "frequency_factors", "factors": factors}


def _llama3_factors(scaling: dict[str, Any], theta: float, count: int) -> NDArray[np.float64]:
    inv_freq = theta ** -(np.arange(count) / count)
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: a high frequency, unchanged
    factors: NDArray[np.float64] = 1.0 / (kept + (1.0 - kept) / scaling["factor"])
    return factors


def _factors(model: Metadata, name: str, rotary_dim: int) -> list[float]:
    tensor = model.file.tensors[name]
    if tensor.shape != (rotary_dim // 2,):
        corrupt(model.file.path, f"{name} has the shape {tensor.shape} where {rotary_dim // 2} are needed")
    factors = model.file.read(tensor)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        corrupt(model.file.path, f"{name} must hold positive numbers")
    return [float(str(factor)) for factor in factors]

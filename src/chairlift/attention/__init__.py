"""Attention over a ragged batch, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift.attention.base import Attend, AttentionBackend, AttentionLayer, KVStorage, RaggedLayout
from chairlift.attention.bursted import BurstedAttention
from chairlift.attention.padded import PaddedAttention
from chairlift.attention.paged_cpu import PagedCPUAttention
from chairlift.errors import InvalidParameter

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (PagedCPUAttention, BurstedAttention, PaddedAttention)
}


def choose_backend(
    name: str, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that can serve the model there."""
    if name == "auto":
        return next(cls() for cls in BACKENDS.values() if not cls.obstacles(layers, device, dtype))
    if name not in BACKENDS:
        raise InvalidParameter("attention", f"unknown backend {name!r}; choose from auto, {', '.join(BACKENDS)}")
    obstacles = BACKENDS[name].obstacles(layers, device, dtype)
    if obstacles:
        raise InvalidParameter("attention", f"{name!r} cannot be used here: {'; '.join(obstacles)}")
    return BACKENDS[name]()


__all__ = [
    "BACKENDS",
    "Attend",
    "AttentionBackend",
    "AttentionLayer",
    "KVStorage",
    "RaggedLayout",
    "choose_backend",
]

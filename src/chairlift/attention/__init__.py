"""Attention over a ragged batch, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift.attention.base import Attend, AttentionBackend, AttentionLayer, FusedAttend, KVStorage, RaggedLayout
from chairlift.attention.bursted import BurstedAttention
from chairlift.attention.padded import PaddedAttention
from chairlift.attention.paged_cpu import PagedCPUAttention
from chairlift.attention.paged_gpu import PagedBatch, PagedGPUAttention
from chairlift.errors import InvalidParameter

_CLASSES: tuple[type[AttentionBackend], ...] = (
    PagedCPUAttention,
    PagedGPUAttention,
    BurstedAttention,
    PaddedAttention,
)
BACKENDS = tuple(dict.fromkeys(backend.name for backend in _CLASSES))  # "ragged" has a class for each device


def choose_backend(
    name: str, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that can serve the model there."""
    if name not in ("auto", *BACKENDS):
        raise InvalidParameter("attention", f"unknown backend {name!r}; choose from auto, {', '.join(BACKENDS)}")
    obstacles: list[str] = []
    for backend in _CLASSES:
        if name in ("auto", backend.name):
            found = backend.obstacles(layers, device, dtype)
            if not found:
                return backend()
            obstacles += found
    raise InvalidParameter("attention", f"{name!r} cannot be used here: {'; '.join(obstacles)}")


__all__ = [
    "BACKENDS",
    "Attend",
    "AttentionBackend",
    "AttentionLayer",
    "FusedAttend",
    "KVStorage",
    "PagedBatch",
    "PagedGPUAttention",
    "RaggedLayout",
    "choose_backend",
]

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
    name: str,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    dtype: torch.dtype,
    *,
    invariant_for: int | None = None,
) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that can serve the model there. `invariant_for`: what it
    computes for a token must not depend on the rest of the batch, for contexts of up to so many tokens."""
    if name not in ("auto", *BACKENDS):
        raise InvalidParameter("attention", f"unknown backend {name!r}; choose from auto, {', '.join(BACKENDS)}")
    obstacles: list[str] = []
    for backend in _CLASSES:
        if name in ("auto", backend.name):
            found = backend.obstacles(layers, device, dtype)
            if not found and invariant_for is None:
                return backend()
            if not found and issubclass(backend, (PagedCPUAttention, PagedGPUAttention)):
                return backend(invariant_for)
            obstacles += found or [f"{backend.name} attention adds up in an order that depends on the batch"]
    if invariant_for is not None:
        raise InvalidParameter("batch_invariant", f"no attention can do it here: {'; '.join(obstacles)}")
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

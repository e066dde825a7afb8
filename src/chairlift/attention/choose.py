"""Choosing an attention backend for a model and a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.interface import AttentionLayer
from chairlift.errors import InvalidParameter


def choose_backend(
    name: str,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    dtype: torch.dtype,
    *,
    invariant_for: int | None = None,
) -> AttentionBackend:
    """The backend called `name`, or with "auto" the preferred one that can run the model there.

    With `invariant_for`, a token's attention must not depend on the rest of the batch, for contexts of up to that many
    tokens.
    """
    if name not in ("auto", *BACKENDS.names()):
        choices = ", ".join(BACKENDS.names())
        raise InvalidParameter("attention", f"unknown backend {name!r}; choose from auto, {choices}")
    candidates = [BACKENDS.get(each) for each in (BACKENDS.names() if name == "auto" else [name])]
    reasons: list[str] = []
    for candidate in sorted(candidates, key=lambda backend: -backend.preference):
        backend = candidate.implementation(device)
        obstacles = [*backend.obstacles(layers, device, dtype), *_lacks(backend, layers)]
        if invariant_for is not None:
            obstacles = [*obstacles, *backend.invariance_obstacles(layers)]
        if not obstacles:
            return backend(invariant_for)
        reasons += obstacles
    if invariant_for is not None:
        raise InvalidParameter("batch_invariant", f"no attention can do it here: {'; '.join(reasons)}")
    raise InvalidParameter("attention", f"{name!r} cannot be used here: {'; '.join(reasons)}")


def _lacks(backend: type[AttentionBackend], layers: Sequence[AttentionLayer]) -> list[str]:
    """What the layers need and the backend does not have."""
    found = []
    if any(layer.sinks for layer in layers) and not backend.capabilities.sinks:
        found.append(f"{backend.name} attention has no sinks")
    if any(layer.chunk is not None for layer in layers) and not backend.capabilities.chunks:
        found.append(f"{backend.name} attention cannot stay within chunks")
    return found

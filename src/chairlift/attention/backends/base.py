"""What the engine needs from an attention backend, and the choice of one for a model and a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from chairlift.attention.backends import BACKENDS
from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, and the batches that it needs."""

    batch_invariant: bool = False  # a token's result can be made independent of the rest of the batch, bit for bit
    rectangular: bool = False  # it needs all sequences padded to the longest chunk
    has_work: bool = False  # its steps have `work`: a compiled kernel can run all layers in one call
    sinks: bool = False  # it can run layers with sinks
    chunks: bool = False  # it can run layers whose attention stays within chunks
    chooses: bool = False  # it can run sparse attention, in which an index chooses positions
    several_tables: bool = False  # it reads the block tables of each layer: `layout.of_table`
    captures: bool = False  # it has `batch_spec`, and can begin a step that only reads device memory, for a graph


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """How a runner packs the batches of captured steps."""

    tile_queries: int  # tokens in a tile of queries
    long_context: int  # tokens: a batch with a longer context is packed as one with long contexts
    splits_more: Callable[[int], bool]  # whether long contexts need a kernel of their own, by the number of rows


class AttentionBackend(ABC):
    """A way to compute attention over a ragged batch. Only `name` and `begin` have no default."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()
    preference: ClassVar[int] = 0  # `auto` takes the backend with the highest one that has no obstacle

    def __init__(self, invariant_for: int | None = None) -> None:
        """`invariant_for`: be batch-invariant for contexts of up to this many tokens, if not None."""
        self.invariant_for = invariant_for

    @classmethod
    def implementation(cls, device: torch.device) -> type[AttentionBackend]:
        """The class that runs on a device."""
        return cls

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why this backend cannot run such a model there; empty if it can."""
        return []

    @classmethod
    def invariance_obstacles(cls, layers: Sequence[AttentionLayer]) -> list[str]:
        """Why a token's result cannot be made independent of the rest of the batch; empty if it can."""
        if cls.capabilities.batch_invariant:
            return []
        return [f"{cls.name} attention adds up in an order that depends on the batch"]

    @abstractmethod
    def begin(self, batch: StepBatch, storage: KVStorage) -> StepAttention:
        """Prepare what all layers of one step have in common.

        With `capabilities.captures` also for a batch that lies in device memory, in buffers that all steps of a
        captured graph share.
        """

    def reserve(self, layers: Sequence[AttentionLayer], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate what steps of up to `rows` single tokens of a model in `dtype` need besides the cache.

        Called before the cache is sized and before a graph is captured that goes on using the memory.
        """
        del layers, rows, dtype, device  # most backends need nothing

    def batch_spec(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> BatchSpec:
        """How to pack batches in device memory; only with `capabilities.captures`."""
        raise NotImplementedError


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
    reasons = []
    if any(layer.sinks for layer in layers) and not backend.capabilities.sinks:
        reasons.append(f"{backend.name} attention has no sinks")
    if any(layer.chunk is not None for layer in layers) and not backend.capabilities.chunks:
        reasons.append(f"{backend.name} attention cannot stay within chunks")
    chosen = next((layer.chooses for layer in layers if layer.chooses is not None), None)
    if chosen is not None and not backend.capabilities.chooses:
        hint = f"up to {chosen:,} tokens all are chosen: --max-model-len {chosen} needs no index"
        reasons.append(f"{backend.name} attention cannot choose positions on this device (index_topk); {hint}")
    return reasons

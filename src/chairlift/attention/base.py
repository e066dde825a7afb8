"""The one interface between a model and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer's attention looks like; everything that may differ between the layers of a model."""

    index: int  # which layer of the KV storage it reads and writes
    num_heads: int
    num_kv_heads: int  # == num_heads: MHA; 1: MQA; in between: GQA
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


class Attend(Protocol):
    """The attention of one step, handed to the model as an argument.

    It stores the new keys and values in the cache and returns, for every token of the ragged batch, the
    attention over its own sequence. T tokens of many sequences are concatenated on the first axis.
    """

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim]; k, v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        ...


@runtime_checkable
class FusedAttend(Attend, Protocol):
    """An attention that also does what comes before it: norms of queries and keys, rotation, and the cache write."""

    def from_projection(
        self,
        layer: AttentionLayer,
        qkv: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        """qkv [T, (heads + 2 * kv_heads) * head_dim], which is used up; norms [head_dim]; cos, sin [T, pairs]
        -> [T, heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class KVStorage:
    """The cache's tensors, one pair per layer, each [num_blocks + 1, block_size, kv_heads, head_dim].

    The last block belongs to nobody: the keys and values of padding are written there.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    stacked: tuple[Tensor, Tensor] | None = None  # the same memory as one: the first layers, as far as they are alike

    @property
    def block_size(self) -> int:
        return int(self.keys[0].shape[1])

    @property
    def scratch_block(self) -> int:
        return int(self.keys[0].shape[0]) - 1

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put each token's key and value [T, kv_heads, head_dim] into its slot (block * block_size + offset)."""
        for side, new in ((self.keys[layer], k), (self.values[layer], v)):
            as_plain(side.view(-1, *side.shape[2:])).index_copy_(0, slots, as_plain(narrowed(new, side.dtype)))

    def clear(self, layer: int, blocks: Sequence[int]) -> None:
        """Make these blocks zeros in one layer."""
        which = sent(blocks, self.keys[layer].device)
        for side in (self.keys[layer], self.values[layer]):
            as_plain(side).index_fill_(0, which, 0)

    def read(self, layer: int, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One sequence's first `length` keys and values, gathered through its block table [blocks]."""
        used = table[: -(-length // self.block_size)]
        sides = (self.keys[layer], self.values[layer])
        keys, values = (
            as_plain(side).index_select(0, used).view(side.dtype).flatten(0, 1)[:length].to(dtype) for side in sides
        )
        return keys, values

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy-on-write. All sources are read before any target is written, so that they may overlap."""
        device = self.keys[0].device
        source, target = sent(sources, device), sent(targets, device)
        for tensor in map(as_plain, (*self.keys, *self.values)):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def sent(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """On a device, without waiting for what it is doing."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def as_plain(tensor: Tensor) -> Tensor:
    """The same memory in a type that torch can index: 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In another type; what 8-bit floats cannot hold becomes the largest that they can."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return tensor.clamp(-limit, limit).to(dtype)
    return tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """Which rows of the batch belong to which sequence, and where each sequence's cache is. S sequences, T tokens.

    Sequence i owns rows [offsets[i], offsets[i + 1]), which are its tokens at positions [starts[i], ends[i]). In a
    rectangle all sequences own equally many rows; those behind a sequence's tokens are padding.
    """

    offsets: Sequence[int]  # S + 1, from 0 to T
    starts: Sequence[int]  # S
    ends: Sequence[int]  # S
    tables: Tensor  # [S, longest table] int32: logical -> physical block, zero-padded
    slots: Tensor  # [T] int64: where each token's key and value go


class AttentionBackend(Protocol):
    """A way to compute attention over a ragged batch."""

    name: str
    rectangular: bool  # whether the batch must be a rectangle, sequences x longest chunk, filled up with padding

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why this backend cannot serve such a model there; empty if it can."""
        ...

    def plan(self, layout: RaggedLayout, storage: KVStorage) -> Attend:
        """Prepare what all layers of one step have in common."""
        ...


def visible_mask(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[end - start, end] bool: which positions the tokens at [start, end) of one sequence may see."""
    queries = torch.arange(start, end, device=device)[:, None]
    positions = torch.arange(end, device=device)[None, :]
    mask = positions <= queries
    return mask if window is None else mask & (positions > queries - window)

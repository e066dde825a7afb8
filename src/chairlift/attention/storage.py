"""The tensors of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.kernels.cpu.attention_work import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class KVStorage:
    """The cache's tensors, a pair for each layer, which layers with different block tables may share. Each is
    [num_blocks + 1, block_size, kv_heads, head_dim].

    8-bit integers have a scale for each token and head: a float32 in four more numbers, behind the head's own.
    The last block is never allocated: the keys and values of padding are written there. In latent attention values are
    the first numbers of the keys: then both of a layer are the same tensor.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    # The same memory as one tensor per side, of the leading planes that have one shape.
    stacked: tuple[Tensor, Tensor] | None = None
    # The plane and the block table of each layer, where layers share planes; see `attention/placement.py`.
    places: Sequence[tuple[int, int]] = ()

    @property
    def block_size(self) -> int:
        return int(self.keys[0].shape[1])

    @property
    def scratch_block(self) -> int:
        return int(self.keys[0].shape[0]) - 1

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor once, of all layers."""
        return list({id(side): side for side in (*self.keys, *self.values)}.values())

    @property
    def num_tables(self) -> int:
        """How many block tables a request has."""
        return 1 + max((table for _, table in self.places), default=0)

    def place(self, layer: int) -> tuple[int, int]:
        """The plane and the number of the block table of a layer."""
        return self.places[layer] if self.places else (layer, 0)

    def sides(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors of one layer: keys and values, or one for both."""
        keys, values = self.keys[layer], self.values[layer]
        return (keys,) if values is keys else (keys, values)

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store each token's key and value [T, kv_heads, head_dim] into its slot (block * block_size + offset)."""
        for side, new in zip(self.sides(layer), (k, v), strict=False):
            as_plain(side.view(-1, *side.shape[2:])).index_copy_(0, slot_mapping, as_plain(narrowed(new, side.dtype)))

    def clear(self, layer: int, slots: Sequence[int]) -> None:
        """Fill these slots (block * block_size + offset) of one layer with zeros."""
        which = sent(slots, self.keys[layer].device)
        for side in self.sides(layer):
            as_plain(side.view(-1, *side.shape[2:])).index_fill_(0, which, 0)

    def read(self, layer: int, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One sequence's first `length` keys and values, gathered through its block table [blocks].

        Where values are the first numbers of the keys, both results are the keys.
        """
        used = table[: -(-length // self.block_size)]
        read = [
            widened(as_plain(side).index_select(0, used).view(side.dtype).flatten(0, 1)[:length], dtype)
            for side in self.sides(layer)
        ]
        return read[0], read[-1]

    def select(self, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The keys [n, kv_heads, head_dim] in these slots (block * block_size + offset) of one layer."""
        side = self.keys[layer]
        rows = as_plain(side.view(-1, *side.shape[2:])).index_select(0, slots)
        return widened(rows.view(side.dtype), dtype)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in all layers. All sources are read before any target is written, so they may overlap."""
        device = self.keys[0].device
        source, target = sent(sources, device), sent(targets, device)
        for tensor in map(as_plain, self.tensors):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def sent(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """`numbers` as a tensor on a device, without waiting for the work queued there."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def as_plain(tensor: Tensor) -> Tensor:
    """The same memory in a type that torch can index: 8-bit numbers as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """The last axis of the cache's tensors."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def bytes_per_number(head_dim: int, dtype: torch.dtype) -> float:
    """The bytes of a cached number, with its share of the scales."""
    return stored_size(head_dim, dtype) * dtype.itemsize / head_dim


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it is stored in another type; values beyond the range of 8-bit floats are clamped to it."""
    if dtype is torch.int8:
        scales = tensor.float().abs().amax(dim=-1, keepdim=True) / 127
        numbers = torch.where(scales > 0, tensor.float() / scales, 0.0).round().to(torch.int8)
        stored = scales.flatten().view(torch.int8).view(*scales.shape[:-1], SCALE_BYTES)
        return torch.cat([numbers, stored], dim=-1)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return tensor.clamp(-limit, limit).to(dtype)
    return tensor.to(dtype)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of stored keys or values: the inverse of `narrowed`."""
    if stored.dtype is not torch.int8:
        return stored.to(dtype)
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (numbers.float() * scales).to(dtype)

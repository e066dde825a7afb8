"""The tensors of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage
from chairlift.kernels.cpu.aligned import aligned


def allocate_storage(
    layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVStorage:
    """Allocate `num_blocks` blocks of each layer and one more, to which padding is written."""
    shapes = [(num_blocks + 1, block_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
    alike = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))  # draft layers may differ

    def one_side() -> tuple[torch.Tensor, list[torch.Tensor]]:
        stacked = _empty((alike, *shapes[0]), dtype, device)
        others = [_empty(shape, dtype, device) for shape in shapes[alike:]]
        return stacked, [*stacked.unbind(0), *others]

    (all_keys, keys), (all_values, values) = one_side(), one_side()
    return KVStorage(keys, values, (all_keys, all_values))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    room = torch.from_numpy(aligned((math.prod(shape) * dtype.itemsize,)))
    return room.view(dtype).view(shape)

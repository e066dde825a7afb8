"""The tensors of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage, stored_size
from chairlift.kernels.cpu.aligned import aligned


def allocate_storage(
    layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVStorage:
    """Allocate `num_blocks` blocks of each layer and one more, to which padding is written."""
    if not layers:  # a model without attention: a layer without numbers has the sizes that others read
        nothing = torch.empty((num_blocks + 1, block_size, 0, 0), dtype=dtype, device=device)
        return KVStorage([nothing], [nothing])
    shapes = [(num_blocks + 1, block_size, layer.num_kv_heads, stored_size(layer.head_dim, dtype)) for layer in layers]
    latent = [layer.latent_dim is not None for layer in layers]
    kinds = list(zip(shapes, latent, strict=True))
    alike = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))  # draft layers may differ
    all_keys = _empty((alike, *shapes[0]), dtype, device)
    all_values = all_keys if latent[0] else _empty((alike, *shapes[0]), dtype, device)
    keys = [*all_keys.unbind(0), *(_empty(shape, dtype, device) for shape in shapes[alike:])]
    values = [
        *(keys[:alike] if latent[0] else all_values.unbind(0)),
        *(keys[i] if latent[i] else _empty(shapes[i], dtype, device) for i in range(alike, len(shapes))),
    ]
    return KVStorage(keys, values, (all_keys, all_values))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    room = torch.from_numpy(aligned((math.prod(shape) * dtype.itemsize,)))
    return room.view(dtype).view(shape)

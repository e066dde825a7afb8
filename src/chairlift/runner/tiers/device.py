"""The parts of blocks on the device, as bytes: keys and values of all layers, and states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.attention.recurrent import StateStorage
from chairlift.attention.storage import KVStorage
from chairlift.core.kv.tiers import KEYS_AND_VALUES, STATE, PartMove
from chairlift.runner.tiers.stores import Data


def part_tensors(storage: KVStorage, states: StateStorage | None) -> dict[str, list[Tensor]]:
    """The tensors that a part is spread over, by its name; the first axis is the block or the slot."""
    tensors = {KEYS_AND_VALUES: [tensor for tensor in storage.tensors if tensor.numel()]}
    if states is not None:
        tensors[STATE] = [tensor for layer in states.layers for tensor in layer.values()]
    return tensors


def part_sizes(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """The bytes of each part; a model without attention has only states."""
    return {part: sum(tensor[0].nbytes for tensor in own) for part, own in tensors.items()}


class HostParts:
    """Parts on a CPU, where the threads read and write the tensors themselves."""

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        self._arrays = {part: [_as_bytes(tensor) for tensor in own] for part, own in tensors.items()}
        self.sizes = part_sizes(tensors)

    def read(self, move: PartMove) -> Data:
        data = np.empty(self.sizes[move.key.part], dtype=np.uint8)
        start = 0
        for array in self._arrays[move.key.part]:
            end = start + array.shape[1]
            data[start:end] = array[move.place]
            start = end
        return data.data

    def write(self, move: PartMove, data: Data) -> None:
        values = np.frombuffer(data, dtype=np.uint8)
        if len(values) != self.sizes[move.key.part]:
            raise ValueError(f"a part has {len(values)} bytes, not {self.sizes[move.key.part]}")
        start = 0
        for array in self._arrays[move.key.part]:
            end = start + array.shape[1]
            array[move.place] = values[start:end]
            start = end


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The same memory as [blocks, bytes]."""
    array: NDArray[np.uint8] = tensor.detach().flatten(1).view(torch.uint8).numpy()
    return array

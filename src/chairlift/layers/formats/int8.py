"""Weights in 8-bit integers on the CPU, with a scale per output channel; activations are rounded at every step."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat
from chairlift.loading.weight_cache.cache_file import PackedArray

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.int8 import PackedWeight
    from chairlift.kernels.cpu.weights import KeptRows


@FORMATS.register("int8")
class Int8Weight(WeightFormat):
    """Products are batch-invariant by construction: every row has scales of its own, and integer sums are exact."""

    name = "int8"
    kv_dtype = torch.bfloat16  # rounding the cache to half its size loses less than rounding the weights
    packs_tiles = True
    devices = ("cpu",)

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        found = []
        if device.type != "cpu":
            found.append(f"it is for the CPU, not for {device.type}")
        if dtype is not torch.float32:
            found.append(f"activations are float32 with it, not {dtype}")
        if importlib.util.find_spec("numba") is None:
            found.append("numba is not installed")
        return found

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        return out_features * (in_features + 4)  # a scale for each output channel

    @staticmethod
    def embedding(table: Tensor) -> Tensor:
        return table.half()  # far finer than 8 bits, and half the memory

    _owns_tiles = True  # they are not part of the tiles of all layers
    _rows: KeptRows | None = None

    def pack_into(self, tiles: PackedWeight) -> None:
        self.tiles, self._owns_tiles = tiles, False

    def packed_arrays(self) -> list[PackedArray]:
        return [] if self.tiles is None or not self._owns_tiles else self.tiles.arrays()

    def use_arrays(self, arrays: Sequence[PackedArray]) -> None:
        from chairlift.kernels.cpu.int8 import PackedWeight

        self.tiles = PackedWeight.empty(1, self.out_features, self.in_features).layer(0).replaced(arrays)
        self.plain = None

    def pack(self) -> None:
        if self.plain is None:
            return
        from chairlift.kernels.cpu.int8 import PackedWeight

        if self.tiles is None:
            self.tiles = PackedWeight.empty(1, self.out_features, self.in_features).layer(0)
        self.tiles.fill(self.plain.float().numpy())
        self.plain = None

    @property
    def num_bytes(self) -> int:
        assert self.tiles is not None
        return self.tiles.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from chairlift.kernels.cpu.decoder import linear
        from chairlift.kernels.cpu.int8 import Rows
        from chairlift.kernels.cpu.weights import KeptRows, multiplied

        assert self.tiles is not None
        if self._rows is None:
            self._rows = KeptRows(Rows, self.in_features)
        return multiplied(linear, x, self._rows, self.tiles, bias, self.out_features)

"""Weights on a CPU in tiles of SIMD kernels, which the fused step multiplies, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chairlift.layers.formats.base import WeightFormat, cpu_kernel_obstacles
from chairlift.loading.weight_cache.cache_file import PackedArray

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.weights import TileWeight


class TiledWeight(WeightFormat):
    """Products are batch-invariant by construction: a row is computed in one order, whatever other rows there are."""

    kv_dtype = torch.bfloat16  # rounding the cache to half its size loses less than rounding the weights
    packs_tiles = True
    devices = ("cpu",)

    _owns_tiles = True  # they are not part of the tiles of all layers

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        return cpu_kernel_obstacles(dtype, device)

    def pack_into(self, tiles: TileWeight) -> None:
        self.tiles, self._owns_tiles = tiles, False

    def packed_arrays(self) -> list[PackedArray]:
        return [] if self.tiles is None or not self._owns_tiles else self.tiles.arrays()

    def use_arrays(self, arrays: Sequence[PackedArray]) -> None:
        self.tiles = self._empty_tiles().replaced(arrays)
        self.plain = None

    def pack(self) -> None:
        if self.plain is None:
            return
        if self.tiles is None:
            self.tiles = self._empty_tiles()
        self.tiles.fill(self.plain.float().numpy())
        self.plain = None

    def _empty_tiles(self) -> TileWeight:
        return self.tile_type().empty(1, self.out_features, self.in_features).layer(0)

    @property
    def num_bytes(self) -> int:
        assert self.tiles is not None
        return self.tiles.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from chairlift.kernels.cpu.decoder import linear
        from chairlift.kernels.cpu.weights import multiplied

        assert self.tiles is not None
        return multiplied(linear, x, self.tiles, bias, self.out_features)

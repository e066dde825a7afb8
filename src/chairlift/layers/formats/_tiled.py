"""Weights on a CPU in tiles of SIMD kernels, which the fused step multiplies, too."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chairlift.layers.formats.base import ALONE, FormatTraits, Fusion, Product, WeightFormat, cpu_kernel_obstacles
from chairlift.loading.weight_cache.cache_file import PackedArray

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.weights import TileWeight


def tiled_traits(
    module: str, tile_type: str, table_dtype: torch.dtype, *, expert_blocks: str | None = None
) -> FormatTraits:
    def load() -> type[TileWeight]:
        found: type[TileWeight] = getattr(import_module(module), tile_type)
        return found

    # Rounding the cache to half its size loses less than rounding the weights.
    return FormatTraits(
        devices=("cpu",),
        kv_dtype=torch.bfloat16,
        table_dtype=table_dtype,
        tile_type=load,
        expert_blocks=expert_blocks,
    )


class TiledWeight(WeightFormat):
    """Products are batch-invariant by construction: a row is computed in one order, whatever other rows there are."""

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        return cpu_kernel_obstacles(dtype, device)

    def packed_arrays(self) -> list[PackedArray]:
        return [] if self.tiles is None or not self.owns_tiles else self.tiles.arrays()

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
        assert self.traits.tile_type is not None
        return self.traits.tile_type().empty(1, self.out_features, self.in_features).layer(0)

    @property
    def num_bytes(self) -> int:
        assert self.tiles is not None
        return self.tiles.nbytes

    @property
    def keeps_row_bits(self) -> bool:
        return True

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        from chairlift.kernels.cpu.decoder import linear
        from chairlift.kernels.cpu.weights import multiplied

        assert self.tiles is not None
        return Product(multiplied(linear, x, self.tiles, fusion.bias, self.out_features))

"""Tiles of the products of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from chairlift.kernels.triton.launch import tuned


class ExpertTiling(NamedTuple):
    """The tile of one program, pipeline depth and splits of the sum."""

    rows: int
    columns: int  # rows of the weight, of which gate and up have one half each
    depth: int  # elements of the sum per iteration; 4-bit floats have a fixed one
    stages: int
    splits: int = 1
    warps: int = 4
    prefetch: int = 0  # iterations whose weights are prefetched before the previous kernel has ended


class ExpertTilings(NamedTuple):
    """The tiles of both products, which have the same number of rows."""

    inner: ExpertTiling  # gate and up
    outer: ExpertTiling  # down

    @property
    def rows(self) -> int:
        return self.inner.rows


def has_few_pairs(pairs: int, num_experts: int) -> bool:
    """Whether most experts have one tile of few rows, so that reading the weights takes most of the time."""
    return pairs <= 16 * num_experts


def tiling_for(
    pairs: int, num_experts: int, dtype: torch.dtype, *, invariant: bool, microscaled: bool = False
) -> ExpertTilings:
    """Tiles for a number of pairs: few pairs per expert use few rows, since experts do not share tiles. Invariant
    products use one tiling for all."""
    if dtype == torch.float32:
        return _both(ExpertTiling(16, 32, 32, 2))
    many = invariant or not tuned() or pairs > 64 * num_experts
    few = not many and has_few_pairs(pairs, num_experts)
    if microscaled:
        if many:
            return _both(ExpertTiling(64, 128, 128, 3))
        return _both(ExpertTiling(16, 64, 128, 4, warps=2) if few else ExpertTiling(32, 128, 128, 3))
    if many:
        return _both(ExpertTiling(64, 128, 64, 4))
    return _both(ExpertTiling(16, 64, 128, 4) if few else ExpertTiling(32, 128, 64, 4))


def few_rows_tiling(dtype: torch.dtype, *, microscaled: bool = False) -> ExpertTilings:
    """Tiles for steps of few tokens: one of 16 rows has all pairs of an expert."""
    if dtype == torch.float32:
        return _both(ExpertTiling(16, 64, 32, 2))
    if microscaled:
        return ExpertTilings(ExpertTiling(8, 64, 128, 4, warps=2), ExpertTiling(8, 64, 128, 4, splits=2, warps=2))
    return _both(ExpertTiling(16, 64, 128, 4))


def _both(tiling: ExpertTiling) -> ExpertTilings:
    return ExpertTilings(tiling, tiling)

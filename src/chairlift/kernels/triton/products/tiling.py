"""The tiles of products with few rows, by the shape of the weight and the number of rows."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from chairlift.kernels.triton.launch import cdiv, last_power_of_2, shared_memory, tuned

SPARE_SHARED = 8 * 2**10  # bytes of shared memory besides the tiles, rounded up
SMALL_WEIGHTS = 8 * 2**20  # elements; a smaller product hardly takes longer than its launch
MANY_COLUMNS = 32768  # more than any layer has, fewer than a vocabulary
MOST_SPLITS = 8  # A sum has no more, since one program adds the parts.
PROGRAMS = 128  # about one per multiprocessor of a Hopper GPU


class ProductTiling(NamedTuple):
    """Tile of one program, pipeline depth and splits of the sum."""

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int
    prefetch: int = 0
    described: bool = False
    warps: int = 4
    band: int = 0  # tiles of rows whose programs run together; 0: all


@cache
def fitting(
    tiling: ProductTiling, gated: bool, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> ProductTiling:
    """Shrink the tiling until two stages fit into shared memory."""
    narrow = tiling._replace(columns=min(64, tiling.columns))
    choices = (tiling, narrow, narrow._replace(depth=tiling.depth // 2))
    enough = min(2, _wanted_stages(tiling, dtype))
    return next((one for one in choices if num_stages(one, gated, dtype, weight_dtype, device) >= enough), choices[-1])


@cache
def num_stages(
    tiling: ProductTiling, gated: bool, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> int:
    """Pipeline stages: as in the tiling, or as many as fit into shared memory."""
    columns = tiling.columns * (2 if gated else 1)
    stage = (tiling.rows * dtype.itemsize + columns * weight_dtype.itemsize) * tiling.depth
    room = shared_memory(device) - SPARE_SHARED
    return max(1, min(_wanted_stages(tiling, dtype), room // stage))


def _wanted_stages(tiling: ProductTiling, dtype: torch.dtype) -> int:
    return tiling.stages if dtype != torch.float32 else max(1, tiling.stages // 2)


def is_faster(rows: int, columns: int, depth: int, gated: bool) -> bool:
    """Whether this kernel is faster than cuBLAS with separate kernels, on an H200."""
    if not tuned():
        return False
    weights = columns * depth * (2 if gated else 1)
    if weights <= SMALL_WEIGHTS:
        return rows <= 256
    if gated:
        return rows <= 128
    if weights > 2 * SMALL_WEIGHTS:
        return rows <= 64
    return rows <= (224 if _fills_chip(columns) else 96)


def _fills_chip(columns: int) -> bool:
    """Whether programs with few columns and all rows fill the GPU."""
    return columns // 32 >= PROGRAMS


@cache
def choose_tiling(rows: int, columns: int, depth: int, gated: bool) -> ProductTiling:
    """The best of about thirty tilings per kind of product on an H200, most of them measured within whole steps, where
    the best is not always the one that is fastest alone."""
    few_tiles = gated and columns <= 64 * PROGRAMS // 2  # The tiles have 64 columns, as for shared experts.
    if few_tiles or columns * depth * (2 if gated else 1) <= SMALL_WEIGHTS:
        return _small_tiling(rows, columns, depth, gated)
    if rows > 64:
        if gated:
            return ProductTiling(128, 128, 64, 1, 4, described=True, warps=8)
        if not _fills_chip(columns):
            return ProductTiling(128, 64, 64, 1, 7, described=True)
        if rows <= 128:
            return ProductTiling(128, 32, 128, 1, 5, described=True)
        return ProductTiling(128, 64, 128, 1, 4, described=True)
    splits = _splits(min(cdiv(columns, 64), PROGRAMS), depth)
    if rows <= 16:
        if gated:
            return ProductTiling(16, 64, 128, 1, 3, prefetch=256, described=True)
        return ProductTiling(16, 64, 128 if splits == 1 else 256, splits, 5 if splits == 1 else 3, described=True)
    height = 32 if rows <= 32 else 64
    stages = (3 if height == 64 else 2) if gated else 5 if height < 64 else 4
    return ProductTiling(height, 64, 128, splits, stages, described=True)


@cache
def choose_rounded_tiling(rows: int, columns: int, depth: int, gated: bool) -> ProductTiling:
    """The same for weights in 8-bit floats; activations are rounded already if there are more than 32 rows."""
    blocks = columns // 64
    if rows > 64:
        if gated:
            return ProductTiling(128, 128, 128, 1, 4, described=True, warps=8)
        if columns > MANY_COLUMNS:
            return ProductTiling(128, 256, 128, 1, 4, described=True, warps=8)
        if rows > 128 and columns > 4096:
            return ProductTiling(128, 128, 128, 1, 6, described=True)
        if rows <= 128 and blocks <= PROGRAMS // 2 and depth >= 8192:
            return ProductTiling(128, 64, 128, 2, 6, described=True)
        return ProductTiling(128, 64, 256, 1, 4, described=True)
    if rows > 32:
        return ProductTiling(
            64, 64, 256, 2 if not gated and blocks <= PROGRAMS // 2 and depth >= 8192 else 1, 5, described=True
        )
    height = 16 if rows <= 16 else 32
    if gated:
        return ProductTiling(height, 128, 128, 1, 6, described=True, warps=8)
    if columns > MANY_COLUMNS:
        return ProductTiling(height, 128, 256, 1, 3, described=True)
    splits = last_power_of_2(min(4, depth // 512, 4 * PROGRAMS // max(1, blocks)))
    return ProductTiling(height, 64, 256, splits, 4, described=True)


@cache
def choose_paired_tiling(rows: int, columns: int, depth: int, gated: bool) -> ProductTiling:
    """The same for activations in pairs of 8-bit rows: the best of 15 to 50 tilings with 1, 8 and 32 rows, each product
    of the Llama-3-8B shape in a graph of itself over different weights."""
    height = 16 if rows <= 8 else 32 if rows <= 16 else 64
    if gated:
        return ProductTiling(height, 128, 256 if height == 16 else 128, 1, 3 if height == 16 else 4, 0, True, 8)
    programs = PROGRAMS if depth < 8192 or height == 64 else 2 * PROGRAMS
    splits = last_power_of_2(min(programs // max(1, columns // 64), depth // 1024))
    return ProductTiling(height, 64, 256, splits, 4, described=True)


def _small_tiling(rows: int, columns: int, depth: int, gated: bool) -> ProductTiling:
    wide = gated or columns >= 2048
    if rows > 128:
        if gated:
            return ProductTiling(128, 64, 128, 1, 3, prefetch=256, described=True)
        return ProductTiling(64, 128 if wide else 32, 128, 1, 4 if wide else 6, prefetch=256, described=True)
    if rows > 64:
        if gated:
            return ProductTiling(64, 64, 128, 1, 4, described=True)
        splits = 1 if wide else _splits(2 * cdiv(columns, 32), depth)
        return ProductTiling(64, 64 if wide else 32, 128, splits, 6, prefetch=256, described=True)
    splits = _splits(cdiv(columns, 32), depth)
    if rows > 32:
        splits = 1 if wide else min(2, splits)
        return ProductTiling(64, 32, 128, splits, 6, prefetch=256, described=True)
    if rows > 16 and gated:
        return ProductTiling(64, 32, 128, 1, 3, prefetch=256, described=True)
    if rows <= 16 and columns >= 4096:
        return ProductTiling(16, 64, 128, 1, 5, prefetch=256)
    return ProductTiling(16 if rows <= 16 else 32, 32, 128, splits, 5 if gated else 6, prefetch=256)


def _splits(programs: int, depth: int) -> int:
    """Splits of the sum that give every multiprocessor work, with at least 512 elements each."""
    return last_power_of_2(min(PROGRAMS // programs, depth // 512, MOST_SPLITS))

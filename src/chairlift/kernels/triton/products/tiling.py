"""The tiles of products with few rows, by the shape of the weight and the number of rows.

Those of batch-invariant products are chosen by the number of rows where no tile changes a bit of a row: the sum of an
output is split by the shape of the weight alone. Within a split, tensor cores add 16 products at a time, in order,
whatever the tile, if they multiply tiles of any height alike. Whether they do is tried once (`tiles_agree`); where they
do not, every number of rows has the tile of 64.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chairlift.kernels.gpu import on_gpu
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


log = logging.getLogger("chairlift")

ONE_TILE_ROWS = 64  # The tile of this many serves every number of rows.
COLUMNS, DEPTH = 128, 1024  # The product that is tried has these.
MOST_ROWS, COMPARED_ROWS = 128, 16  # The tiles that are tried have up to 128 rows, and 16 of each are compared.
NUM_TRIED = 6


@triton.jit
def _try_tile(
    x_ptr, weight_ptr, out_ptr, ROWS: tl.constexpr, STEP: tl.constexpr, SWAPPED: tl.constexpr, KEPT: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the first rows of a product in a tile of ROWS rows, which adds STEP columns at a time."""
    m, n = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    A: tl.constexpr = COLUMNS if SWAPPED else ROWS
    B: tl.constexpr = ROWS if SWAPPED else COLUMNS
    acc = tl.zeros([A, B], tl.float32)
    for at in range(0, DEPTH, STEP):
        k = at + tl.arange(0, STEP)
        left = tl.load(x_ptr + m[:, None] * DEPTH + k[None, :])
        right = tl.load(weight_ptr + n[:, None] * DEPTH + k[None, :])
        if SWAPPED:
            left, right = right, left
        acc = tl.dot(left, tl.trans(right), acc)
    if SWAPPED:
        acc = tl.trans(acc)
    tl.store(out_ptr + m[:, None] * COLUMNS + n[None, :], acc, mask=(m < KEPT)[:, None])


@triton.jit
def _agreement_kernel(
    x_ptr,  # [128, DEPTH]
    weight_ptr,  # [COLUMNS, DEPTH]
    out_ptr,  # [6, KEPT, COLUMNS] float32
    KEPT: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first rows of a product in tiles of all heights that products have, with either operand on the left."""
    SIZE: tl.constexpr = KEPT * COLUMNS
    _try_tile(x_ptr, weight_ptr, out_ptr, 64, 64, False, KEPT, DEPTH, COLUMNS)
    _try_tile(x_ptr, weight_ptr, out_ptr + SIZE, 16, 128, False, KEPT, DEPTH, COLUMNS)
    _try_tile(x_ptr, weight_ptr, out_ptr + 2 * SIZE, 16, 64, True, KEPT, DEPTH, COLUMNS)
    _try_tile(x_ptr, weight_ptr, out_ptr + 3 * SIZE, 32, 128, False, KEPT, DEPTH, COLUMNS)
    _try_tile(x_ptr, weight_ptr, out_ptr + 4 * SIZE, 32, 64, True, KEPT, DEPTH, COLUMNS)
    _try_tile(x_ptr, weight_ptr, out_ptr + 5 * SIZE, 128, 64, False, KEPT, DEPTH, COLUMNS)


@cache
def tiles_agree(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tiles of 16 to 128 rows, by four and by eight warps, give a row the same bits, on random numbers.

    A GPU that is not there is assumed to agree. The interpreter's library orders sums by the size of a matrix."""
    if device.type != "cuda":
        return on_gpu(device)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, DEPTH, generator=generator).to(device, dtype) for size in (MOST_ROWS, COLUMNS))
    out = torch.empty(2, NUM_TRIED, COMPARED_ROWS, COLUMNS, device=device)
    for found, warps in zip(out, (4, 8), strict=True):
        _agreement_kernel[(1,)](
            x, weight, found, KEPT=COMPARED_ROWS, DEPTH=DEPTH, COLUMNS=COLUMNS, num_warps=warps, num_stages=2
        )
    agree = all(each.equal(out[0, 0]) for each in out.flatten(0, 1))
    if not agree:
        log.warning("batch-invariant products have one tile: others give other bits on this GPU")
    return agree


def invariant_tiling(
    rows: int, columns: int, depth: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> ProductTiling:
    """The tiling of a product whose rows do not depend on their number."""
    return choose_invariant_tiling(
        rows if tuned() and tiles_agree(dtype, device) else ONE_TILE_ROWS, columns, depth, gated
    )


def invariant_splits(columns: int, depth: int, gated: bool) -> int:
    """Splits of the sum, which is part of the order of sums: by the shape of the weight alone."""
    if gated or columns > MANY_COLUMNS:
        return 1
    few_columns = last_power_of_2(min(PROGRAMS // cdiv(columns, 32), depth // 512, 4))
    return max(few_columns, 2) if depth >= 8192 and columns <= 64 * PROGRAMS // 2 else few_columns


@cache
def choose_invariant_tiling(rows: int, columns: int, depth: int, gated: bool) -> ProductTiling:
    """The best of three to six tilings per product of the Qwen3-0.6B and Llama-3-8B shapes with 1, 32, 128 and 8,192
    rows on an H200, each in a graph of itself over different weights; with 33 to 64 rows those of `choose_tiling`.
    Small weights with up to 32 rows: by whole steps, but for split sums of up to 16 rows."""
    splits = invariant_splits(columns, depth, gated)
    small = columns * depth * (2 if gated else 1) <= SMALL_WEIGHTS
    if rows > 256 and cdiv(rows, 128) * cdiv(columns, 128) >= PROGRAMS:
        return _tiling_of_many_rows(rows, columns, splits, gated, small)
    if columns > MANY_COLUMNS and rows > 16:
        if rows <= 32:
            return ProductTiling(32, 128, 64, 1, 6, described=True)
        return ProductTiling(64 if rows <= 64 else 128, 128, 64, 1, 6, described=True, warps=4 if rows <= 64 else 8)
    if gated:
        return _invariant_gated_tiling(rows, small)
    return (_invariant_small_tiling if small else _invariant_large_tiling)(rows, columns, splits)


def _tiling_of_many_rows(rows: int, columns: int, splits: int, gated: bool, small: bool) -> ProductTiling:
    """Splits are computed in sequence, with a second sum in registers."""
    if not gated and (small or (splits == 1 and columns > 4096)):
        return ProductTiling(128, 128, 64, splits, 3, described=True, band=8)
    wide = splits == 1 and not gated and cdiv(rows, 128) * cdiv(columns, 256) >= PROGRAMS
    return ProductTiling(128, 256 if wide else 128, 64, splits, 4, described=True, warps=8, band=8)


def _invariant_gated_tiling(rows: int, small: bool) -> ProductTiling:
    if rows <= 16:
        return ProductTiling(16, 64, 128, 1, 4, prefetch=256 if small else 0, described=True)
    if small:
        if rows <= 32:
            return ProductTiling(32, 64, 128, 1, 4, prefetch=256, described=True)
        if rows <= 64:
            return ProductTiling(64, 32, 128, 1, 3, prefetch=256, described=True)
        return ProductTiling(64, 64, 128, 1, 4, described=True)
    if rows <= 64:
        return ProductTiling(32 if rows <= 32 else 64, 64, 128, 1, 2 if rows <= 32 else 3, described=True)
    return ProductTiling(128, 128, 64, 1, 4, described=True, warps=8)


def _invariant_small_tiling(rows: int, columns: int, splits: int) -> ProductTiling:
    if rows <= 16 and columns >= 4096:
        return ProductTiling(16, 64, 128, splits, 5, described=True)
    if rows <= 16:
        return ProductTiling(16, 32, 128, splits, 6, prefetch=256)
    if rows <= 32:
        if columns >= 4096:
            return ProductTiling(32, 32, 128, splits, 6, prefetch=256, described=True)
        return ProductTiling(32, 64, 128, splits, 4, prefetch=256, described=True)
    return ProductTiling(64, 32 if rows <= 64 else 64, 128, splits, 6, prefetch=256, described=True)


def _invariant_large_tiling(rows: int, columns: int, splits: int) -> ProductTiling:
    if rows <= 64:
        height = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return ProductTiling(height, 64, 128, splits, 5 if rows <= 32 else 4, described=True)
    if splits == 1 and columns <= 32 * PROGRAMS:
        return ProductTiling(128, 32, 128, 1, 5, described=True)
    return ProductTiling(128, 64, 64, splits, 7, described=True)

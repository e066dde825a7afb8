"""Tiles of batch-invariant products: chosen by the number of rows where no tile changes a bit of a row.

The sum of an output is split by the shape of the weight alone. Within a split, tensor cores add 16 products at a time,
in order, whatever the tile, if they multiply tiles of any height alike. Whether they do is tried once (`tiles_agree`);
where they do not, every number of rows has the tile of 64.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl

from chairlift.kernels.gpu import on_gpu
from chairlift.kernels.triton.launch import cdiv, last_power_of_2, tuned
from chairlift.kernels.triton.products.tiling import MANY_COLUMNS, PROGRAMS, SMALL_WEIGHTS, ProductTiling

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
        return _gated_tiling(rows, small)
    return (_small_tiling if small else _large_tiling)(rows, columns, splits)


def _tiling_of_many_rows(rows: int, columns: int, splits: int, gated: bool, small: bool) -> ProductTiling:
    """Splits are computed in sequence, with a second sum in registers."""
    if not gated and (small or (splits == 1 and columns > 4096)):
        return ProductTiling(128, 128, 64, splits, 3, described=True, band=8)
    wide = splits == 1 and not gated and cdiv(rows, 128) * cdiv(columns, 256) >= PROGRAMS
    return ProductTiling(128, 256 if wide else 128, 64, splits, 4, described=True, warps=8, band=8)


def _gated_tiling(rows: int, small: bool) -> ProductTiling:
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


def _small_tiling(rows: int, columns: int, splits: int) -> ProductTiling:
    if rows <= 16 and columns >= 4096:
        return ProductTiling(16, 64, 128, splits, 5, described=True)
    if rows <= 16:
        return ProductTiling(16, 32, 128, splits, 6, prefetch=256)
    if rows <= 32:
        if columns >= 4096:
            return ProductTiling(32, 32, 128, splits, 6, prefetch=256, described=True)
        return ProductTiling(32, 64, 128, splits, 4, prefetch=256, described=True)
    return ProductTiling(64, 32 if rows <= 64 else 64, 128, splits, 6, prefetch=256, described=True)


def _large_tiling(rows: int, columns: int, splits: int) -> ProductTiling:
    if rows <= 64:
        height = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return ProductTiling(height, 64, 128, splits, 5 if rows <= 32 else 4, described=True)
    if splits == 1 and columns <= 32 * PROGRAMS:
        return ProductTiling(128, 32, 128, 1, 5, described=True)
    return ProductTiling(128, 64, 64, splits, 7, described=True)

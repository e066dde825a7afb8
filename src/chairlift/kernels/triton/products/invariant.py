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

ONE_TILE_ROWS = 64  # whose tile serves every number of rows
COLUMNS, DEPTH = 64, 1024  # of the product that is tried


@triton.jit
def _agreement_kernel(x_ptr, weight_ptr, out_ptr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The first 16 of 64 rows times a weight: in a tile of 64 rows, of 16, and with the weight on the left."""
    n = tl.arange(0, COLUMNS)
    few, many = tl.arange(0, 16), tl.arange(0, 64)
    large = tl.zeros([64, COLUMNS], tl.float32)
    for at in range(0, DEPTH, 64):
        k = at + tl.arange(0, 64)
        x = tl.load(x_ptr + many[:, None] * DEPTH + k[None, :])
        large = tl.dot(x, tl.trans(tl.load(weight_ptr + n[:, None] * DEPTH + k[None, :])), large)
    small = tl.zeros([16, COLUMNS], tl.float32)
    for at in range(0, DEPTH, 128):
        k = at + tl.arange(0, 128)
        x = tl.load(x_ptr + few[:, None] * DEPTH + k[None, :])
        small = tl.dot(x, tl.trans(tl.load(weight_ptr + n[:, None] * DEPTH + k[None, :])), small)
    swapped = tl.zeros([COLUMNS, 16], tl.float32)
    for at in range(0, DEPTH, 32):
        k = at + tl.arange(0, 32)
        x = tl.load(x_ptr + few[:, None] * DEPTH + k[None, :])
        swapped = tl.dot(tl.load(weight_ptr + n[:, None] * DEPTH + k[None, :]), tl.trans(x), swapped)
    tl.store(out_ptr + many[:, None] * COLUMNS + n[None, :], large)
    tl.store(out_ptr + 64 * COLUMNS + few[:, None] * COLUMNS + n[None, :], small)
    tl.store(out_ptr + 80 * COLUMNS + few[None, :] * COLUMNS + n[:, None], swapped)


@cache
def tiles_agree(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tiles of 16 and of 64 rows, also with exchanged sides, give a row the same bits, on random numbers.

    A GPU that is not there is assumed to agree. The interpreter's library orders sums by the size of a matrix."""
    if device.type != "cuda":
        return on_gpu(device)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, DEPTH, generator=generator).to(device, dtype) for size in (64, COLUMNS))
    out = torch.empty(96, COLUMNS, device=device)
    _agreement_kernel[(1,)](x, weight, out, DEPTH=DEPTH, COLUMNS=COLUMNS, num_warps=4)
    agree = out[:16].equal(out[64:80]) and out[:16].equal(out[80:])
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
    rows on an H200, each in a graph of itself over different weights; with 33 to 64 rows those of `choose_tiling`."""
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
        return ProductTiling(16, 64, 128, 1, 4, described=True)
    if small:
        if rows <= 64:
            return ProductTiling(64, 32, 128, 1, 3, prefetch=256, described=True)
        return ProductTiling(64, 64, 128, 1, 4, described=True)
    if rows <= 64:
        return ProductTiling(32 if rows <= 32 else 64, 64, 128, 1, 2 if rows <= 32 else 3, described=True)
    return ProductTiling(128, 128, 64, 1, 4, described=True, warps=8)


def _small_tiling(rows: int, columns: int, splits: int) -> ProductTiling:
    if rows <= 16 and columns >= 4096:
        return ProductTiling(16, 64, 128, splits, 5, described=True)
    if rows <= 32:
        return ProductTiling(16 if rows <= 16 else 32, 32, 128, splits, 6, prefetch=256)
    return ProductTiling(64, 32 if rows <= 64 else 64, 128, splits, 6, prefetch=256, described=True)


def _large_tiling(rows: int, columns: int, splits: int) -> ProductTiling:
    if rows <= 64:
        height = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return ProductTiling(height, 64, 128, splits, 5 if rows <= 32 else 4, described=True)
    if splits == 1 and columns <= 32 * PROGRAMS:
        return ProductTiling(128, 32, 128, 1, 5, described=True)
    return ProductTiling(128, 64, 64, splits, 7, described=True)

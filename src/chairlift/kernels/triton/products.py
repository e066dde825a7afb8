"""Matrix products with few rows, as in decode steps, fused with the operations before and after them.

Such a product is bound by reading weights and by the number of kernels, each of which costs microseconds. So a product
includes

    the norm before it      its weight is part of the matrix already (see `models/stacks/fused_gpu.py`), leaving one
                            factor per row; the kernel that wrote the rows provides their sums of squares
    the activation after it gate and up are computed by the same program
    the addition to the residual stream, and the sums of squares of the result, for the norm that comes next

Outputs with few columns do not fill the GPU; their sum is split among several programs, and the last one to finish adds
the parts, always in the same order.

Weights never change, so they are prefetched into L2 while the previous kernel still runs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from chairlift.kernels.triton.launch import (
    cdiv,
    empty_rows,
    last_power_of_2,
    next_power_of_2,
    overlapping,
    prefetch_rows,
    shared_memory,
)


@triton.jit
def _sum_of_parts(parts_ptr, tile, A: tl.constexpr, B: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """Add the parts in order, read from L2 where other multiprocessors wrote them, with all loads in flight."""
    acc = tl.zeros([A, B], tl.float32)
    for other in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + other * STEP + tile, cache_modifier=".cg")
    return acc


@triton.jit
def _tile(tiles, row, rows_at, at, end, BK: tl.constexpr, DESCRIBED: tl.constexpr, EVEN_DEPTH: tl.constexpr):
    """Load a tile of rows from column `at` on, by tensor descriptor or by pointers."""
    k = at + tl.arange(0, BK)
    if DESCRIBED:
        tile = tiles.load([row, at])
    elif EVEN_DEPTH:
        tile = tl.load(rows_at[:, None] + k[None, :])
    else:
        tile = tl.load(rows_at[:, None] + k[None, :], mask=(k < end)[None, :], other=0.0)
    return tile


@triton.jit
def _plus_product(acc, x, w, SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    if SWAPPED:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M"])  # one kernel for all row counts of a tile
def _product_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; GATED: [2 * N, K], the gate's rows first
    x_tiles,  # the same two as tensor descriptors, if DESCRIBED
    weight_tiles,
    bias_ptr,  # [N]
    out_ptr,  # [M, N]; with RESIDUAL the product is added to it
    squares_ptr,  # [M, SQUARES] float32: partial sums of squares of x's rows
    squares_out_ptr,  # [M, programs along the columns] float32
    partial_ptr,  # [programs, SPLITS, 1 or 2, BM * BN] float32
    arrived_ptr,  # [programs] int32, all zero between launches
    M,
    N,
    K,
    eps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,  # 0: x is not normalised
    SQUARES_PADDED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,  # the weight is the left operand, which needs at least 64 rows on Hopper
    DESCRIBED: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of the weight prefetched before the previous kernel has ended
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row_block = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    m = row_block * BM + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    per_split = tl.cdiv(K, SPLITS * BK) * BK
    begin = split * per_split
    end = tl.minimum(begin + per_split, K)
    # Rows and columns past the end read other rows and columns, and their results are dropped. They wrap around,
    # since reading the same one many times is slow.
    w_at = weight_ptr + (n % N).to(tl.int64) * K
    x_at = x_ptr + (m % M).to(tl.int64) * K
    if OVERLAP:
        if PREFETCH > 0 and row_block == 0:
            size = tl.maximum(tl.minimum(end - begin, PREFETCH), 0) * 2
            prefetch_rows(w_at + begin, size)
            if GATED:
                prefetch_rows(w_at + N.to(tl.int64) * K + begin, size)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SQUARES > 0:
        part = tl.arange(0, SQUARES_PADDED)
        squares = tl.load(
            squares_ptr + m[:, None] * SQUARES + part[None, :],
            mask=(m < M)[:, None] & (part < SQUARES)[None, :],
            other=0.0,
        )
    A: tl.constexpr = BN if SWAPPED else BM
    B: tl.constexpr = BM if SWAPPED else BN
    acc = tl.zeros([A, B], tl.float32)
    up = tl.zeros([A, B], tl.float32)
    for at in range(begin, end, BK):
        w = _tile(weight_tiles, block * BN, w_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
        x = _tile(x_tiles, row_block * BM, x_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
        acc = _plus_product(acc, x, w, SWAPPED, PRECISION)
        if GATED:
            w = _tile(weight_tiles, N + block * BN, w_at + N.to(tl.int64) * K, at, end, BK, DESCRIBED, EVEN_DEPTH)
            up = _plus_product(up, x, w, SWAPPED, PRECISION)

    if SPLITS > 1:
        TILE: tl.constexpr = BM * BN
        STEP: tl.constexpr = 2 * TILE if GATED else TILE
        program = row_block * tl.num_programs(1) + block
        parts = partial_ptr + program.to(tl.int64) * SPLITS * STEP
        tile = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
        tl.store(parts + split * STEP + tile, acc)
        if GATED:
            tl.store(parts + split * STEP + TILE + tile, up)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.debug_barrier()
        acc = _sum_of_parts(parts, tile, A, B, SPLITS, STEP)
        if GATED:
            up = _sum_of_parts(parts + TILE, tile, A, B, SPLITS, STEP)
        tl.store(arrived_ptr + program, 0)

    if SWAPPED:
        acc = tl.trans(acc)
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        acc *= factor
    if BIAS:
        acc += tl.load(bias_ptr + n % N).to(tl.float32)[None, :]
    if GATED:
        if SWAPPED:
            up = tl.trans(up)
        if SQUARES > 0:
            up *= factor
        acc = acc / (1.0 + tl.exp(-acc)) * up
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    keep = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        acc += tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_at, rounded, mask=keep)
    if RESIDUAL:  # the next norm needs sums of squares
        kept = tl.where(keep, rounded.to(tl.float32), 0.0)
        tl.store(squares_out_ptr + m * tl.num_programs(1) + block, tl.sum(kept * kept, 1), mask=m < M)


@cache
def _scratch(size: int, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scratch memory shared by all kernels of one stream, which run in sequence."""
    return torch.empty(size, device=device), torch.zeros(programs, dtype=torch.int32, device=device)


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


def product(
    x: Tensor,
    weight: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    tiling: ProductTiling | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [M, K] times weight [N, K] transposed; with `add_to`, also the partial sums of squares of the result's rows.

    `squares` [M, parts]: normalise each row of x by these partial sums of squares.
    `gated`: weight is [2 N, K]; the result is silu(first half) * second half.
    `add_to` [M, N]: add the result to it in place.
    """
    rows, depth = x.shape
    columns = len(weight) // (2 if gated else 1)
    tiling = _fitting(tiling or choose_tiling(rows, columns, depth, gated), gated, x.dtype, x.device)
    out = add_to if add_to is not None else empty_rows(rows, columns, dtype=x.dtype, device=x.device)
    across = cdiv(columns, tiling.columns)
    programs = cdiv(rows, tiling.rows) * across
    tile = tiling.rows * tiling.columns * (2 if gated else 1)
    partial, arrived = _scratch(programs * tiling.splits * tile if tiling.splits > 1 else 1, programs, x.device)
    squares_out = None if add_to is None else torch.empty(rows, across, dtype=torch.float32, device=x.device)
    assert x.is_contiguous()
    described = tiling.described and reads_ahead(x.device)
    num_squares = 0 if squares is None else squares.shape[1]
    _product_kernel[(cdiv(rows, tiling.rows), across, tiling.splits)](
        x,
        weight,
        _rows_and_room(x, tiling) if described else x,
        TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.depth]) if described else weight,
        weight if bias is None else bias,
        out,
        partial if squares is None else squares,
        partial if squares_out is None else squares_out,
        partial,
        arrived,
        rows,
        columns,
        depth,
        eps,
        BM=tiling.rows,
        BN=tiling.columns,
        BK=tiling.depth,
        SPLITS=tiling.splits,
        SQUARES=num_squares,
        SQUARES_PADDED=next_power_of_2(max(1, num_squares)),
        GATED=gated,
        RESIDUAL=add_to is not None,
        BIAS=bias is not None,
        EVEN_DEPTH=depth % tiling.depth == 0,
        SWAPPED=tiling.rows < 64 and tiling.columns >= 64,
        DESCRIBED=described,
        PREFETCH=tiling.prefetch,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=_stages(tiling, gated, x.dtype, x.device),
        **overlapping(x.device),
    )
    return out, squares_out


def _rows_and_room(x: Tensor, tiling: ProductTiling) -> TensorDescriptor:
    """Describe x with the spare rows its last tile covers (see `empty_rows`); their results are dropped."""
    rows, depth = x.shape
    room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // depth
    tiled = min(room, cdiv(rows, tiling.rows) * tiling.rows)
    return TensorDescriptor(x, [tiled, depth], [depth, 1], [tiling.rows, tiling.depth])


@cache
def _fitting(tiling: ProductTiling, gated: bool, dtype: torch.dtype, device: torch.device) -> ProductTiling:
    """Shrink the tiling until two stages fit into shared memory."""
    narrow = tiling._replace(columns=min(64, tiling.columns))
    choices = (tiling, narrow, narrow._replace(depth=tiling.depth // 2))
    enough = min(2, _wanted_stages(tiling, dtype))
    return next((one for one in choices if _stages(one, gated, dtype, device) >= enough), choices[-1])


@cache
def _stages(tiling: ProductTiling, gated: bool, dtype: torch.dtype, device: torch.device) -> int:
    """Pipeline stages: as in the tiling, or as many as fit into shared memory."""
    stage = (tiling.rows + tiling.columns * (2 if gated else 1)) * tiling.depth * dtype.itemsize
    room = shared_memory(device) - SPARE_SHARED
    return max(1, min(_wanted_stages(tiling, dtype), room // stage))


def _wanted_stages(tiling: ProductTiling, dtype: torch.dtype) -> int:
    return tiling.stages if dtype != torch.float32 else max(1, tiling.stages // 2)


SPARE_SHARED = 8 * 2**10  # bytes of shared memory besides the tiles, rounded up
SMALL_WEIGHTS = 8 * 2**20  # elements; a smaller product hardly takes longer than its launch
PROGRAMS = 128  # about one per multiprocessor of a Hopper GPU


def is_faster(rows: int, columns: int, depth: int, gated: bool) -> bool:
    """Whether this kernel is faster than cuBLAS with separate kernels, on an H200."""
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
def reads_ahead(device: torch.device) -> bool:
    """Whether tiles are copied by the tensor memory accelerator: on Hopper and later, and in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def choose_tiling(rows: int, columns: int, depth: int, gated: bool) -> ProductTiling:
    """The best of about thirty tilings per kind of product on an H200, most of them measured within whole steps, where
    the best is not always the one that is fastest alone."""
    if columns * depth * (2 if gated else 1) <= SMALL_WEIGHTS:
        return _small_tiling(rows, columns, depth, gated)
    if rows > 64:
        if gated:
            return ProductTiling(128, 128, 64, 1, 4, described=True, warps=8)
        if not _fills_chip(columns):
            return ProductTiling(128, 64, 64, 1, 7, described=True)
        if rows <= 128:
            return ProductTiling(128, 32, 128, 1, 5, described=True)
        return ProductTiling(128, 64, 128, 1, 4, described=True)
    splits = 2 if columns // 64 <= PROGRAMS // 2 and depth >= 1024 else 1
    if rows <= 16:
        if gated:
            return ProductTiling(16, 64, 128, 1, 3, prefetch=256, described=True)
        return ProductTiling(16, 64, 128 if splits == 1 else 256, splits, 5 if splits == 1 else 3, described=True)
    height = 32 if rows <= 32 else 64
    stages = (3 if height == 64 else 2) if gated else 5 if height < 64 else 4
    return ProductTiling(height, 64, 128, splits, stages, described=True)


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
    return last_power_of_2(min(PROGRAMS // programs, depth // 512))

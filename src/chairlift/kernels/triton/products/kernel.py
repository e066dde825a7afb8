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

import triton
import triton.language as tl

from chairlift.kernels.triton.launch import prefetch_rows
from chairlift.kernels.triton.widen import widened


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
def _plus_product(
    acc, x, w, scale, SCALED: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr
):
    """Add a product of tiles; SCALED: `scale` has the rows' scales within these columns."""
    if w.dtype != x.dtype:
        w = widened(w, x.dtype, FAST)
    if SCALED:
        part = tl.dot(w, tl.trans(x)) if SWAPPED else tl.dot(x, tl.trans(w))
        acc += part * (scale[None, :] if SWAPPED else scale[:, None])
    elif SWAPPED:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M"])  # one kernel for all row counts of a tile
def product_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; GATED: [2 * N, K], the gate's rows first
    x_tiles,  # the same two as tensor descriptors, if DESCRIBED
    weight_tiles,
    weight_scale_ptr,  # [N] or [2 * N] float32, with W_SCALED
    x_scale_ptr,  # [M, K / X_GROUP] float32, with X_GROUP
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
    W_SCALED: tl.constexpr,
    X_GROUP: tl.constexpr,  # columns of x that share a scale: BK, K, or 0 if x has no scales
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
            size = tl.maximum(tl.minimum(end - begin, PREFETCH), 0) * (
                weight_ptr.dtype.element_ty.primitive_bitwidth // 8
            )
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
    BY_TILE: tl.constexpr = X_GROUP == BK
    scale = 1.0
    for at in range(begin, end, BK):
        w = _tile(weight_tiles, block * BN, w_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
        x = _tile(x_tiles, row_block * BM, x_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
        if BY_TILE:
            scale = tl.load(x_scale_ptr + (m % M) * (K // BK) + at // BK)
        acc = _plus_product(acc, x, w, scale, BY_TILE, SWAPPED, PRECISION, OVERLAP)
        if GATED:
            w = _tile(weight_tiles, N + block * BN, w_at + N.to(tl.int64) * K, at, end, BK, DESCRIBED, EVEN_DEPTH)
            up = _plus_product(up, x, w, scale, BY_TILE, SWAPPED, PRECISION, OVERLAP)

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
    if SQUARES > 0 or X_GROUP > BK:
        factor = tl.full([BM], 1.0, tl.float32)
        if SQUARES > 0:
            factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        if X_GROUP > BK:
            factor *= tl.load(x_scale_ptr + m % M)
        acc *= factor[:, None]
    if W_SCALED:
        acc *= tl.load(weight_scale_ptr + n % N)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n % N).to(tl.float32)[None, :]
    if GATED:
        if SWAPPED:
            up = tl.trans(up)
        if SQUARES > 0 or X_GROUP > BK:
            up *= factor[:, None]
        if W_SCALED:
            up *= tl.load(weight_scale_ptr + N + n % N)[None, :]
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

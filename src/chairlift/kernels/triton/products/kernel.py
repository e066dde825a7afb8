"""Matrix products with few rows, as in decode steps, fused with the operations before and after them.

Such a product is bound by reading weights and by the number of kernels, each of which costs microseconds. So a product
includes

    the norm before it      its weight is part of the matrix already (see `models/programs/fuse_gpu.py`), leaving one
                            factor per row; the kernel that wrote the rows provides their sums of squares
    the activation after it gate and up are computed by the same program, or the activation is multiplied by numbers
                            that are there already
    the addition to the residual stream, and the sums of squares of the result, for the norm that comes next

Weights in 8-bit floats have a scale per row. Activations that are rounded to 8 bits, too, are multiplied with them as
they are. Other activations keep their precision: the weights are widened in registers, or, where gate and up would both
have to be and activations are bfloat16, each element of the normalised rows is replaced by the sum of two 8-bit
numbers, which is as exact as bfloat16. Or the kernel before has split them (PAIRS): each row is the sum of two rows of
e5m2 numbers, which have its range without a scale and six bits together; tensor cores multiply both with a row of
weights as they are.

Outputs with few columns do not fill the GPU; their sum is split among several programs, and the last one to finish adds
the parts, always in the same order. With many rows and a tiling that must not depend on their number (batch
invariance), one program computes the parts in sequence, with the same sums.

Weights never change, so they are prefetched into L2 while the previous kernel still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.kernels.triton.fp8 import split_terms
from chairlift.kernels.triton.launch import pairwise_sum, parts_of_rows, prefetch_rows
from chairlift.kernels.triton.products.activation import activated
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
def _plus_product(acc, x, w, SWAPPED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr):
    if w.dtype != x.dtype and x.dtype.primitive_bitwidth > 8:
        w = widened(w, x.dtype, FAST)
    if SWAPPED:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _two_terms(x, scale):
    """8-bit floats whose sum is a row times its scale, as exact as bfloat16."""
    wide = x.to(tl.float32) * scale[:, None]
    high = wide.to(tl.float8e4nv)
    return high, (wide - high.to(tl.float32)).to(tl.float8e4nv)


@triton.jit
def _joined(acc, SWAPPED: tl.constexpr):
    """Add the products of the two rows of each pair."""
    if SWAPPED:
        acc = tl.sum(acc.reshape(acc.shape[0], acc.shape[1] // 2, 2), 2)
    else:
        acc = tl.sum(acc.reshape(acc.shape[0] // 2, 2, acc.shape[1]), 1)
    return acc


@triton.jit
def _sums(
    x_tiles,
    weight_tiles,
    x_at,
    w_at,
    up_at,
    x_row,
    w_row,
    up_row,
    begin,
    end,
    scale,
    A: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """The products of a tile over the columns from `begin` to `end`; the second with the rows of `up` if GATED."""
    acc = tl.zeros([A, B], tl.float32)
    up = tl.zeros([A, B], tl.float32)
    for at in range(begin, end, BK):
        w = _tile(weight_tiles, w_row, w_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
        x = _tile(x_tiles, x_row, x_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
        if TWO_TERMS:
            x, low = _two_terms(x, scale)
            acc = _plus_product(acc, low, w, SWAPPED, PRECISION, FAST)
        acc = _plus_product(acc, x, w, SWAPPED, PRECISION, FAST)
        if GATED:
            w = _tile(weight_tiles, up_row, up_at, at, end, BK, DESCRIBED, EVEN_DEPTH)
            if TWO_TERMS:
                up = _plus_product(up, low, w, SWAPPED, PRECISION, FAST)
            up = _plus_product(up, x, w, SWAPPED, PRECISION, FAST)
    return acc, up


@triton.jit(do_not_specialize=["M"])  # one kernel for all row counts of a tile
def product_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; GATED: [2 * N, K], the gate's rows first
    x_tiles,  # the same two as tensor descriptors, if DESCRIBED
    weight_tiles,
    weight_scale_ptr,  # [N] or [2 * N] float32, with EIGHT_BITS
    x_scale_ptr,  # [M] float32, with ROUNDED
    bias_ptr,  # [N]
    times_ptr,  # [M, N], rows `times_stride` apart, with TIMES
    out_ptr,  # [M, N]; with RESIDUAL the product is added to it
    pairs_ptr,  # e5m2 [2 * M, N]: the result as sums of two rows, with SPLIT
    squares_ptr,  # [M, SQUARES] float32: partial sums of squares of x's rows
    squares_out_ptr,  # [M, tiles along the columns] float32
    partial_ptr,  # [programs, SPLITS, 1 or 2, BM * BN] float32
    arrived_ptr,  # [programs] int32, all zero between launches
    M,
    N,
    K,
    times_stride,
    per_split,  # columns of a split of the sum, a multiple of BK
    eps,
    reach,  # Normalised rows are scaled by it before they are replaced by 8-bit numbers.
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_SEQUENCE: tl.constexpr,  # one program computes all splits
    BAND: tl.constexpr,  # tiles of rows whose programs run together, so that L2 holds what they read; 0: all
    SQUARES: tl.constexpr,  # 0: x is not normalised
    SQUARES_PADDED: tl.constexpr,
    LATE: tl.constexpr,  # The squares are read after the sums: they would take too many registers meanwhile.
    EIGHT_BITS: tl.constexpr,  # the weight is in 8-bit floats
    ROUNDED: tl.constexpr,  # x is, too
    PAIRS: tl.constexpr,  # x is e5m2 [2 * M, K], two rows for each row
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,  # the result is activation(gate) * up
    TIMES: tl.constexpr,  # the result is activation(product) * times
    ACTIVATION: tl.constexpr,
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
    across = tl.cdiv(N, BN)
    if BAND > 0:
        band = row_block // (BAND * across)
        inside_band = row_block - band * BAND * across
        height = tl.minimum(tl.cdiv(M, BM) - band * BAND, BAND)
        row_block = band * BAND + inside_band % height
        block = inside_band // height
    ROWS: tl.constexpr = BM // 2 if PAIRS else BM  # The result has this many.
    m = row_block * ROWS + tl.arange(0, ROWS)
    n = block * BN + tl.arange(0, BN)
    begin = split * per_split
    end = tl.minimum(begin + per_split, K)
    # Rows and columns past the end read other rows and columns, and their results are dropped. They wrap around,
    # since reading the same one many times is slow.
    w_at = weight_ptr + (n % N).to(tl.int64) * K
    x_rows = row_block * BM + tl.arange(0, BM)
    x_at = x_ptr + (x_rows % (2 * M if PAIRS else M)).to(tl.int64) * K
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
    if SQUARES > 0 and not LATE:  # asked for here, needed at the end
        squares = parts_of_rows(squares_ptr, m, M, SQUARES, SQUARES_PADDED)
    # Weights are widened, or each element of x is replaced by two 8-bit numbers, whichever takes less time. These have
    # the precision of bfloat16 only, and tensor cores add products of 8-bit numbers with fewer bits than others.
    BOTH_WIDE: tl.constexpr = EIGHT_BITS and not ROUNDED and not PAIRS and GATED
    TWO_TERMS: tl.constexpr = BOTH_WIDE and SQUARES > 0 and x_ptr.dtype.element_ty == tl.bfloat16
    if TWO_TERMS:
        scale = tl.rsqrt(pairwise_sum(squares) / K + eps) * reach
    A: tl.constexpr = BN if SWAPPED else BM
    B: tl.constexpr = BM if SWAPPED else BN
    up_at = w_at
    if GATED:
        up_at += N.to(tl.int64) * K
    if not TWO_TERMS:
        scale = eps  # not used
    if IN_SEQUENCE:
        acc = tl.zeros([A, B], tl.float32)
        up = tl.zeros([A, B], tl.float32)
        for part in range(SPLITS):
            begin = part * per_split
            end = tl.minimum(begin + per_split, K)
            more, more_up = _sums(
                x_tiles, weight_tiles, x_at, w_at, up_at, row_block * BM, block * BN, N + block * BN, begin, end, scale,
                A, B, BK, GATED, TWO_TERMS, SWAPPED, DESCRIBED, EVEN_DEPTH, PRECISION, OVERLAP,
            )  # fmt: skip
            acc += more
            up += more_up
    else:
        acc, up = _sums(
            x_tiles, weight_tiles, x_at, w_at, up_at, row_block * BM, block * BN, N + block * BN, begin, end, scale,
            A, B, BK, GATED, TWO_TERMS, SWAPPED, DESCRIBED, EVEN_DEPTH, PRECISION, OVERLAP,
        )  # fmt: skip

    if PAIRS:
        acc = _joined(acc, SWAPPED)
        if GATED:
            up = _joined(up, SWAPPED)
    if SPLITS > 1 and not IN_SEQUENCE:
        TILE: tl.constexpr = ROWS * BN
        STEP: tl.constexpr = 2 * TILE if GATED else TILE
        program = row_block * across + block
        parts = partial_ptr + program.to(tl.int64) * SPLITS * STEP
        C: tl.constexpr = BN if SWAPPED else ROWS
        D: tl.constexpr = ROWS if SWAPPED else BN
        tile = tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(parts + split * STEP + tile, acc)
        if GATED:
            tl.store(parts + split * STEP + TILE + tile, up)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.debug_barrier()
        acc = _sum_of_parts(parts, tile, C, D, SPLITS, STEP)
        if GATED:
            up = _sum_of_parts(parts + TILE, tile, C, D, SPLITS, STEP)
        tl.store(arrived_ptr + program, 0)

    if SWAPPED:
        acc = tl.trans(acc)
    if SQUARES > 0 or EIGHT_BITS:
        if TWO_TERMS:
            factor = tl.full([ROWS], 1.0, tl.float32) / reach
        elif SQUARES > 0:
            if LATE:
                squares = parts_of_rows(squares_ptr, m, M, SQUARES, SQUARES_PADDED)
            factor = tl.rsqrt(pairwise_sum(squares) / K + eps)
        else:
            factor = tl.full([ROWS], 1.0, tl.float32)
        if ROUNDED:
            factor *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
        acc *= factor[:, None]
    if EIGHT_BITS:
        acc *= tl.load(weight_scale_ptr + n % N)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n % N).to(tl.float32)[None, :]
    if GATED:
        if SWAPPED:
            up = tl.trans(up)
        if SQUARES > 0 or EIGHT_BITS:
            up *= factor[:, None]
        if EIGHT_BITS:
            up *= tl.load(weight_scale_ptr + N + n % N)[None, :]
        acc = activated(acc, ACTIVATION) * up
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    keep = (m < M)[:, None] & (n < N)[None, :]
    if TIMES:
        times_at = times_ptr + m.to(tl.int64)[:, None] * times_stride + n[None, :]
        acc = activated(acc, ACTIVATION) * tl.load(times_at, mask=keep, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_at, rounded, mask=keep)
    if SPLIT:
        high, low = split_terms(rounded)
        pairs_at = pairs_ptr + (2 * m).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(pairs_at, high, mask=keep)
        tl.store(pairs_at + N, low, mask=keep)
    if RESIDUAL:  # the next norm needs sums of squares
        kept = tl.where(keep, rounded.to(tl.float32), 0.0)
        tl.store(squares_out_ptr + m * across + block, pairwise_sum(kept * kept), mask=m < M)

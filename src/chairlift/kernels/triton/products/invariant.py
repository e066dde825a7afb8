"""Batch-invariant matrix products: each row is bit for bit the same, however many rows are multiplied at once.

Libraries choose a kernel by the number of rows, and another kernel sums in another order. Here one kernel with one tile
serves every number of rows, and the sum of an output is always split into the same parts, added in the same order. With
few rows each part has its own program, to fill the GPU; with many rows one program computes the parts in sequence.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import Tiling, cdiv, last_power_of_2, overlapping, split_scratch

PARALLEL_ROWS = 256  # up to this many rows, the parts of a sum have their own programs
PROGRAMS = 264  # two per multiprocessor of a Hopper GPU


@triton.jit(do_not_specialize=["M"])  # one kernel for all row counts
def _linear_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    x_scale_ptr,  # [M] float32: row scales, with SCALED
    weight_scale_ptr,  # [N] float32: column scales, with SCALED
    bias_ptr,  # [N]
    out_ptr,  # [M, N]; with RESIDUAL the product is added to it
    partial_ptr,  # [tiles, PARTS, BM, BN] float32
    arrived_ptr,  # [tiles] int32, all zero between launches
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    BAND: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    # Neighbouring programs share columns within a band of rows, for reuse in L2.
    tiles_down = tl.cdiv(M, BM)
    band = tile // (BAND * tl.cdiv(N, BN))
    height = tl.minimum(tiles_down - band * BAND, BAND)
    inside_band = tile - band * BAND * tl.cdiv(N, BN)
    m = (band * BAND + inside_band % height) * BM + tl.arange(0, BM)
    n = inside_band // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    is_row = (m < M)[:, None]
    is_column = (n < N)[:, None]
    x_at = x_ptr + m.to(tl.int64)[:, None] * K
    w_at = weight_ptr + n.to(tl.int64)[:, None] * K

    side_by_side = tl.num_programs(1) > 1
    first = tl.where(side_by_side, tl.program_id(1), 0)
    last = tl.where(side_by_side, tl.program_id(1) + 1, PARTS)
    depth = tl.cdiv(K, PARTS * BK) * BK
    total = tl.zeros([BM, BN], tl.float32)
    for part in range(first, last):
        acc = tl.zeros([BM, BN], tl.float32)
        end = tl.minimum((part + 1) * depth, K)
        for at in range(part * depth, end, BK):
            kk = at + k
            inside = (kk < end)[None, :]
            w = tl.load(w_at + kk[None, :], mask=is_column & inside, other=0.0)
            x = tl.load(x_at + kk[None, :], mask=is_row & inside, other=0.0)
            if SCALED:  # accumulate fp8 products in float32 here: the tensor cores accumulate less exactly
                acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=BK)
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        total += acc

    if side_by_side:
        place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        parts = partial_ptr + tile.to(tl.int64) * PARTS * BM * BN
        tl.store(parts + tl.program_id(1) * BM * BN + place, total, mask=is_row)
        tl.debug_barrier()
        counter = arrived_ptr + tile
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != PARTS - 1:
            return
        tl.debug_barrier()
        tl.store(counter, 0)
        total = tl.zeros([BM, BN], tl.float32)
        for part in range(PARTS):
            total += tl.load(parts + part * BM * BN + place, mask=is_row, other=0.0, volatile=True)
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    keep = is_row & (n < N)[None, :]
    if SCALED:
        total *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
        total *= tl.load(weight_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        total += tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=keep)


@cache
def _tiling(columns: int, depth: int, dtype: torch.dtype) -> Tiling:
    """Tiling by the weight's shape alone, so that it does not depend on the batch."""
    if dtype == torch.float32:
        height, width, at_once, stages = 32, 32, 32, 2
    else:
        height, width, at_once, stages = 64, 64 if columns <= 8192 else 128, 128 // dtype.itemsize, 4
    parts = min(last_power_of_2(PROGRAMS // cdiv(columns, width)), 8, max(1, depth // 512))
    return Tiling(height, width, at_once, stages, parts)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    add_to: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; added in place to `add_to` [M, N] if given.

    `scales`: row and column scales [M] and [N] float32 of fp8 operands.
    """
    x = x.contiguous()
    (rows, depth), columns = x.shape, len(weight)
    out = torch.empty(rows, columns, dtype=out_dtype or x.dtype, device=x.device) if add_to is None else add_to
    tiling = _tiling(columns, depth, x.dtype)
    tiles = cdiv(rows, tiling.rows) * cdiv(columns, tiling.columns)
    if not tiles:
        return out
    side_by_side = tiling.parts > 1 and rows <= PARALLEL_ROWS
    stored = tiles * tiling.parts * tiling.rows * tiling.columns if side_by_side else 1
    partial, arrived = split_scratch(stored, tiles if side_by_side else 1, x.device)
    _linear_kernel[(tiles, tiling.parts if side_by_side else 1)](
        x,
        weight,
        *((partial, partial) if scales is None else scales),
        weight if bias is None else bias,
        out,
        partial,
        arrived,
        rows,
        columns,
        depth,
        BM=tiling.rows,
        BN=tiling.columns,
        BK=tiling.depth,
        PARTS=tiling.parts,
        BAND=8,
        SCALED=scales is not None,
        HAS_BIAS=bias is not None,
        RESIDUAL=add_to is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=tiling.stages,
        **overlapping(x.device),
    )
    return out

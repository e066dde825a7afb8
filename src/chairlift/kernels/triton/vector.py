"""Products of a single row with weights in 8-bit floats, without tensor cores.

With one row a product takes as long as reading the weight, and whatever else a program does shows: copies to shared
memory, barriers, waiting for the previous kernel. A program reads the first tile of its weights straight into registers
before it waits for the previous kernel, and needs no shared memory for tiles, so that programs of the next kernel start
while the last ones of this kernel end.

The bits of an e4m3 number at the place of a float32's are the number times 2^-120: three integer operations convert it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping, split_scratch
from chairlift.kernels.triton.products.tiling import MANY_COLUMNS


@triton.jit
def _pair(words, kind: tl.constexpr):
    """The two 16-bit floats of an int32 as float32."""
    if kind == tl.float16:
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _four_floats(words):
    """The e4m3 numbers of an int32, times 2^-120."""
    a = (((words << 24) >> 4) & -2014314496).to(tl.float32, bitcast=True)  # 0x87f00000
    b = (((words << 16) >> 4) & -2014314496).to(tl.float32, bitcast=True)
    c = (((words << 8) >> 4) & -2014314496).to(tl.float32, bitcast=True)
    d = ((words >> 4) & -2014314496).to(tl.float32, bitcast=True)
    return a, b, c, d


@triton.jit
def _combined(total, partial_ptr, arrived_ptr, block, split, BN: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of all splits, and whether this program is the last to arrive, which has it."""
    at = tl.arange(0, BN)
    parts = partial_ptr + block * SPLITS * BN
    tl.store(parts + split * BN + at, total)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    tl.debug_barrier()
    if is_last:
        total = tl.zeros([BN], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(parts + other * BN + at, cache_modifier=".cg")
        tl.store(arrived_ptr + block, 0)
    return total, is_last


@triton.jit
def vector_kernel(
    x_ptr,  # [K]
    x_words_ptr,  # int64 [K / 4], the same
    weight_ptr,  # int32 [N, K / 4]; GATED: [2 N, K / 4], the gate's rows first
    weight_scale_ptr,  # [N] or [2 N] float32
    bias_ptr,  # [N]
    out_ptr,  # [N]; with RESIDUAL the product is added to it
    squares_ptr,  # [SQUARES] float32: partial sums of squares of x
    squares_out_ptr,  # [programs along the columns] float32
    partial_ptr,  # [programs, SPLITS, BN] float32, twice with GATED
    arrived_ptr,  # [programs] int32, all zero between launches
    N,
    K,
    eps,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of a program
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,  # 0: x is not normalised
    SQUARES_PADDED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    q = split * (STEPS * BK // 4) + tl.arange(0, BK // 4)
    at = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * (K // 4) + q[None, :]
    words = tl.load(at, mask=(q < K // 4)[None, :], other=0, eviction_policy="evict_first")
    if GATED:
        up_at = at + N.to(tl.int64) * (K // 4)
        up_words = tl.load(up_at, mask=(q < K // 4)[None, :], other=0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor = 1.0
    if SQUARES > 0:
        part = tl.arange(0, SQUARES_PADDED)
        squares = tl.load(squares_ptr + part, mask=part < SQUARES, other=0.0)
    acc = tl.zeros([BN, BK // 4], tl.float32)
    up_acc = tl.zeros([BN, BK // 4], tl.float32)
    BIG: tl.constexpr = 18446744073709551616.0  # 2^64, so that products with weights times 2^-120 are not tiny
    for step in tl.static_range(STEPS):
        four = tl.load(x_words_ptr + q, mask=q < K // 4, other=0)
        x0, x1 = _pair(four.to(tl.int32), x_ptr.dtype.element_ty)
        x2, x3 = _pair((four >> 32).to(tl.int32), x_ptr.dtype.element_ty)
        x0, x1, x2, x3 = (x0 * BIG)[None, :], (x1 * BIG)[None, :], (x2 * BIG)[None, :], (x3 * BIG)[None, :]
        a, b, c, d = _four_floats(words)
        if step + 1 < STEPS:
            q += BK // 4
            at += BK // 4
            words = tl.load(at, mask=(q < K // 4)[None, :], other=0, eviction_policy="evict_first")
        acc += a * x0
        acc += b * x1
        acc += c * x2
        acc += d * x3
        if GATED:
            a, b, c, d = _four_floats(up_words)
            if step + 1 < STEPS:
                up_at += BK // 4
                up_words = tl.load(up_at, mask=(q < K // 4)[None, :], other=0, eviction_policy="evict_first")
            up_acc += a * x0
            up_acc += b * x1
            up_acc += c * x2
            up_acc += d * x3
    LEFT: tl.constexpr = 72057594037927936.0  # 2^56
    total = tl.sum(acc, 1) * LEFT
    up = total
    if GATED:
        up = tl.sum(up_acc, 1) * LEFT
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if SPLITS > 1:
        if GATED:  # written before the first sum's arrival is counted
            tl.store(partial_ptr + (tl.num_programs(0) + block) * SPLITS * BN + split * BN + tl.arange(0, BN), up)
        total, is_last = _combined(total, partial_ptr, arrived_ptr, block, split, BN, SPLITS)
        if not is_last:
            return
        if GATED:
            up = tl.zeros([BN], tl.float32)
            parts = partial_ptr + (tl.num_programs(0) + block) * SPLITS * BN
            for other in tl.static_range(SPLITS):
                up += tl.load(parts + other * BN + tl.arange(0, BN), cache_modifier=".cg")
    total *= tl.load(weight_scale_ptr + tl.minimum(n, N - 1))
    if GATED:
        up *= tl.load(weight_scale_ptr + N + tl.minimum(n, N - 1))
    inside = n < N
    total *= factor
    if BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * (up * factor)
    if RESIDUAL:
        total += tl.load(out_ptr + n, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, rounded, mask=inside)
    if RESIDUAL:  # the next norm needs sums of squares
        kept = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(squares_out_ptr + block, tl.sum(kept * kept, 0))


MOST_STEPS = 16  # tiles of a program; its loop is unrolled


class VectorTiling(NamedTuple):
    """Tile of a program, tiles one after the other, and splits of the sum."""

    columns: int
    depth: int
    steps: int
    splits: int
    warps: int


@cache
def choose_vector_tiling(columns: int, depth: int, gated: bool) -> VectorTiling:
    """The best of about ten on an H200 for each product of the Llama-3-8B shape, within the four products of a layer
    over different weights."""
    is_head = columns > MANY_COLUMNS and not gated
    tile = min(1024 if is_head else 2048, next_power_of_2(depth))
    splits = cdiv(depth, MOST_STEPS * tile)
    width = 4 if gated else 16 if is_head else 8
    return VectorTiling(width, tile, cdiv(depth, splits * tile), splits, 4 if tile >= 512 else 1)


def vector_product(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    tiling: VectorTiling | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`product` for a single row and a weight in 8-bit floats."""
    rows, depth = x.shape
    assert rows == 1
    assert x.element_size() == 2
    columns = len(weight) // (2 if gated else 1)
    tiling = tiling or choose_vector_tiling(columns, depth, gated)
    out = add_to if add_to is not None else empty_rows(1, columns, dtype=x.dtype, device=x.device)
    across = cdiv(columns, tiling.columns)
    partial, arrived = split_scratch(across * tiling.splits * tiling.columns * 2, across, x.device)
    squares_out = None if add_to is None else torch.empty(1, across, dtype=torch.float32, device=x.device)
    num_squares = 0 if squares is None else squares.shape[1]
    vector_kernel[(across, tiling.splits)](
        x,
        x.view(torch.int64),
        weight.view(torch.int32),
        weight_scales,
        x if bias is None else bias,
        out,
        partial if squares is None else squares,
        partial if squares_out is None else squares_out,
        partial,
        arrived,
        columns,
        depth,
        eps,
        BN=tiling.columns,
        BK=tiling.depth,
        STEPS=tiling.steps,
        SPLITS=tiling.splits,
        SQUARES=num_squares,
        SQUARES_PADDED=next_power_of_2(max(1, num_squares)),
        GATED=gated,
        RESIDUAL=add_to is not None,
        BIAS=bias is not None,
        num_warps=tiling.warps,
        **overlapping(x.device),
    )
    return out, squares_out

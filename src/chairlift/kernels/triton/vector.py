"""Products of a single row with weights in 8-bit floats, without tensor cores.

With one row a product takes as long as reading the weight, and whatever else a program does shows: copies to shared
memory, barriers, waiting for the previous kernel. A program reads its scales and the first tiles of its weights
straight into registers before it waits for the previous kernel, and needs no shared memory for tiles, so that programs
of the next kernel start while the last ones of this kernel end.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, empty_rows, has_asm, next_power_of_2, overlapping, split_scratch


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
def _four_floats(words, ASM: tl.constexpr):
    """The e4m3 numbers of an int32 as float32."""
    if ASM:  # They become float16 first, which has all of them.
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 x, y, p, q, r, s;
            .reg .b32 low, high;
            mov.b32 {x, y}, $4;
            cvt.rn.f16x2.e4m3x2 low, x;
            cvt.rn.f16x2.e4m3x2 high, y;
            mov.b32 {p, q}, low;
            mov.b32 {r, s}, high;
            cvt.f32.f16 $0, p;
            cvt.f32.f16 $1, q;
            cvt.f32.f16 $2, r;
            cvt.f32.f16 $3, s;
            }
            """,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:  # Only the interpreter comes here: GPUs with 8-bit floats have the instruction.
        a = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        b = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        c = ((words >> 16) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        d = ((words >> 24) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return a, b, c, d


@triton.jit
def _load_tile(at, q, K):
    """Load words `q` of some rows of the weight, zero beyond its depth; each is read once in a step."""
    return tl.load(at, mask=(q < K // 4)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _first_tiles(at, q, K, AHEAD: tl.constexpr):
    """Load a tile, and with AHEAD 2 the one behind it."""
    words = _load_tile(at, q, K)
    then = words
    if AHEAD == 2:
        then = _load_tile(at + q.shape[0], q + q.shape[0], K)
    return words, then


@triton.jit
def _next_tiles(then, at, q, K, AHEAD: tl.constexpr, LEFT: tl.constexpr):
    """Move on to the tile at `q`: load it, or with AHEAD 2 return `then`, loaded before, and load the one behind it.

    LEFT tiles are left, this one included."""
    words = then
    if AHEAD == 1:
        words = _load_tile(at, q, K)
    elif LEFT > 1:
        then = _load_tile(at + q.shape[0], q + q.shape[0], K)
    return words, then


@triton.jit
def _zeros_in_words(weight_ptr, q):
    """Zeros of the shape of `q`, by a load that is compiled away after it has decided which words of x a thread holds.

    Loads that depend on the same `q` get the same number of neighbouring elements per thread, the most that 16 bytes
    hold for any of them. Alone, the int64 words of x would get 2; 32-bit words get 4, as the weights do. With unequal
    numbers x goes through shared memory, with eight barriers per tile."""
    return tl.load(weight_ptr + q, mask=q < 0, other=0).to(tl.float32)


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
    AHEAD: tl.constexpr,  # tiles in flight
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    inside = n < N
    row = tl.minimum(n, N - 1)
    q = split * (STEPS * BK // 4) + tl.arange(0, BK // 4)
    at = weight_ptr + row.to(tl.int64)[:, None] * (K // 4) + q[None, :]
    words, then = _first_tiles(at, q, K, AHEAD)
    weight_scale = tl.load(weight_scale_ptr + row)
    if GATED:
        up_at = at + N.to(tl.int64) * (K // 4)
        up_words, up_then = _first_tiles(up_at, q, K, AHEAD)
        up_scale = tl.load(weight_scale_ptr + N + row)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor = 1.0
    if SQUARES > 0:
        part = tl.arange(0, SQUARES_PADDED)
        squares = tl.load(squares_ptr + part, mask=part < SQUARES, other=0.0)
    if RESIDUAL:
        before = tl.load(out_ptr + n, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros([BN, BK // 4], tl.float32) + _zeros_in_words(weight_ptr, q)[None, :]
    up_acc = tl.zeros([BN, BK // 4], tl.float32)
    for step in tl.static_range(STEPS):
        four = tl.load(x_words_ptr + q, mask=q < K // 4, other=0)
        x0, x1 = _pair(four.to(tl.int32), x_ptr.dtype.element_ty)
        x2, x3 = _pair((four >> 32).to(tl.int32), x_ptr.dtype.element_ty)
        x0, x1, x2, x3 = x0[None, :], x1[None, :], x2[None, :], x3[None, :]
        a, b, c, d = _four_floats(words, ASM)
        if step + 1 < STEPS:
            q += BK // 4
            at += BK // 4
            words, then = _next_tiles(then, at, q, K, AHEAD, STEPS - step - 1)
        acc += a * x0
        acc += b * x1
        acc += c * x2
        acc += d * x3
        if GATED:
            a, b, c, d = _four_floats(up_words, ASM)
            if step + 1 < STEPS:
                up_at += BK // 4
                up_words, up_then = _next_tiles(up_then, up_at, q, K, AHEAD, STEPS - step - 1)
            up_acc += a * x0
            up_acc += b * x1
            up_acc += c * x2
            up_acc += d * x3
    total = tl.sum(acc, 1)
    up = total
    if GATED:
        up = tl.sum(up_acc, 1)
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if SPLITS > 1:
        if GATED:  # These are written before the first sum's arrival is counted.
            tl.store(partial_ptr + (tl.num_programs(0) + block) * SPLITS * BN + split * BN + tl.arange(0, BN), up)
        total, is_last = _combined(total, partial_ptr, arrived_ptr, block, split, BN, SPLITS)
        if not is_last:
            return
        if GATED:
            up = tl.zeros([BN], tl.float32)
            parts = partial_ptr + (tl.num_programs(0) + block) * SPLITS * BN
            for other in tl.static_range(SPLITS):
                up += tl.load(parts + other * BN + tl.arange(0, BN), cache_modifier=".cg")
    total *= weight_scale * factor
    if BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * (up * up_scale * factor)
    if RESIDUAL:
        total += before
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
    ahead: int = 1  # tiles in flight, 1 or 2


@cache
def choose_vector_tiling(depth: int, *, gated: bool, added: bool) -> VectorTiling:
    """The tile of a product that ends in a gate, is `added` to the residual stream, or neither.

    The best of 15 to 17 for each product of the Llama-3-8B shape, within whole layers on an H200. The head has the tile
    of queries, keys and values, 0.2% slower than the best of 13. Depths beyond the longest loop have larger tiles, the
    second best of the down projection: splits of its sum took longer."""
    tile = min(1024 if depth <= MOST_STEPS * 1024 else 2048, next_power_of_2(depth))
    splits = cdiv(depth, MOST_STEPS * tile)
    steps = cdiv(depth, splits * tile)
    warps = max(1, tile // 512)  # a thread reads 16 bytes of each row
    return VectorTiling(2 if gated else 4, tile, steps, splits, warps, 2 if added and steps > 1 else 1)


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
    tiling = tiling or choose_vector_tiling(depth, gated=gated, added=add_to is not None)
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
        AHEAD=tiling.ahead,
        ASM=has_asm(x.device),
        num_warps=tiling.warps,
        **overlapping(x.device),
    )
    return out, squares_out

"""Mixture of experts on a GPU: all experts in one kernel, without synchronising with the host.

Pairs of a token and one of its experts are sorted by expert. Each expert's pairs are split into tiles of rows, and one
grid computes the tiles of all experts. Only the device knows the number of tiles, so the grid has the size of the worst
case; programs without a tile return at once.

    pairs        t0e2 t0e5 t1e2 t1e0          expert of each pair, as routed
    order        3 | 0 2 | 1                  the pairs of expert 0, of 2, of 5
    slots        e0 | _ | e2 | _ | _ | e5     expert e's tiles begin at slot start[e] // ROWS + e

Slots assigned this way never overlap, without counting other experts' tiles: c pairs need at most c // ROWS + 1 tiles,
and at least as many slots lie before the next expert's first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import Tiling, cdiv, next_power_of_2, overlapping, tuned

NO_EXPERT = tl.constexpr(-1)
BEYOND = tl.constexpr(2**30)  # above every expert id: no expert counts or takes it


@triton.jit
def _sort_kernel(
    experts_ptr,  # [pairs] int64 or int32: the expert of each pair
    positions_ptr,  # [tokens] int32, -1 for padding rows, whose pairs are left out
    order_ptr,  # [pairs] int32: the pairs, sorted by expert
    tile_expert_ptr,  # [slots] int32, NO_EXPERT for slots without a tile
    tile_begin_ptr,  # [slots] int32: first index in `order`
    tile_end_ptr,  # [slots] int32
    num_pairs,
    TOP_K: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per expert collects its pairs in order and splits them into tiles."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    smaller = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_pairs, BLOCK):
        expert = _expert_of(at + lane, experts_ptr, positions_ptr, num_pairs, TOP_K, HAS_POSITIONS)
        smaller += (expert < me).to(tl.int32)
        mine += (expert == me).to(tl.int32)
    start = tl.sum(smaller, 0)
    end = start + tl.sum(mine, 0)
    found = start
    for at in range(0, num_pairs, BLOCK):
        expert = _expert_of(at + lane, experts_ptr, positions_ptr, num_pairs, TOP_K, HAS_POSITIONS)
        is_mine = (expert == me).to(tl.int32)
        tl.store(order_ptr + found + tl.cumsum(is_mine, 0) - 1, at + lane, mask=is_mine == 1)
        found += tl.sum(is_mine, 0)
    first_slot = start // ROWS + me
    # The last expert clears the slots that pairs of padding rows leave unused.
    is_last = me == tl.num_programs(0) - 1
    num_slots = tl.where(is_last, num_pairs, end) // ROWS + me + 1 - first_slot
    for at in range(0, num_slots, BLOCK):
        slot = at + lane
        begin = start + slot * ROWS
        inside = slot < num_slots
        tl.store(tile_expert_ptr + first_slot + slot, tl.where(begin < end, me, NO_EXPERT), mask=inside)
        tl.store(tile_begin_ptr + first_slot + slot, begin, mask=inside)
        tl.store(tile_end_ptr + first_slot + slot, tl.minimum(begin + ROWS, end), mask=inside)


@triton.jit
def _expert_of(pair, experts_ptr, positions_ptr, num_pairs, TOP_K: tl.constexpr, HAS_POSITIONS: tl.constexpr):
    """The expert of each pair, BEYOND for pairs of padding rows."""
    exists = pair < num_pairs
    expert = tl.load(experts_ptr + pair, mask=exists, other=BEYOND)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + pair // TOP_K, mask=exists, other=-1)
        expert = tl.where(position < 0, BEYOND, expert)
    return expert


@triton.jit
def _dequantized(numbers, scale, like):
    """4-bit floats (sign, two bits of exponent, one of mantissa) times a scale per row, in the type of `like`."""
    exponent = (numbers >> 1) & 3
    mantissa = numbers & 1
    doubled = tl.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    signed = tl.where((numbers & 8) != 0, -doubled, doubled)
    return (signed.to(tl.float32) * (0.5 * scale)[:, None]).to(like.dtype)


@triton.jit
def _power_of_two(exponents):
    """2 ** (exponent - 127) by the bits of a float; the smallest is 0."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _grouped_kernel(
    x_ptr,  # [tokens, K], or with SCATTER [pairs, K] in sorted order
    weight_ptr,  # [experts, N, K]; PACKED: [experts, N, K / 2] bytes
    exponents_ptr,  # [experts, N, K / 32] bytes, with PACKED only
    bias_ptr,  # [experts, N], with HAS_BIAS only
    out_ptr,  # [pairs, N] in sorted order, or with SCATTER in the order of the pairs
    order_ptr,
    tile_expert_ptr,
    tile_begin_ptr,
    tile_end_ptr,
    share_ptr,  # [pairs]: with HAS_SHARE the routing weight that multiplies each row
    N,
    K,
    TOP_K: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    PACKED: tl.constexpr,  # 4-bit floats in the order of `layers/expert_weights.py`; BK has no effect
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + slot).to(tl.int64)
    if expert == NO_EXPERT:
        return
    place = tl.load(tile_begin_ptr + slot) + tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end_ptr + slot)
    pair = tl.load(order_ptr + place, mask=is_row, other=0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    source = place if SCATTER else pair // TOP_K
    x_at = x_ptr + source.to(tl.int64)[:, None] * K
    acc = tl.zeros([ROWS, BN], tl.float32)
    if PACKED:
        byte = tl.arange(0, 32)
        w_at = weight_ptr + (expert * N + n)[:, None] * (K // 2) + byte[None, :]
        scale_at = exponents_ptr + (expert * N + n) * (K // 32)
        x_at += byte[None, :]
        for chunk in range(K // 64):
            codes = tl.load(w_at + chunk * 32, mask=(n < N)[:, None], other=0).to(tl.int32)
            low = _power_of_two(tl.load(scale_at + 2 * chunk, mask=n < N, other=0))
            high = _power_of_two(tl.load(scale_at + 2 * chunk + 1, mask=n < N, other=0))
            x = tl.load(x_at + chunk * 64, mask=is_row[:, None], other=0.0)
            acc = tl.dot(x, tl.trans(_dequantized(codes & 15, low, x)), acc, input_precision=PRECISION)
            x = tl.load(x_at + chunk * 64 + 32, mask=is_row[:, None], other=0.0)
            acc = tl.dot(x, tl.trans(_dequantized(codes >> 4, high, x)), acc, input_precision=PRECISION)
    else:
        w_at = weight_ptr + (expert * N + n)[:, None] * K
        for at in range(0, K, BK):
            kk = at + k
            inside = (kk < K)[None, :]
            w = tl.load(w_at + kk[None, :], mask=(n < N)[:, None] & inside, other=0.0)
            x = tl.load(x_at + kk[None, :], mask=is_row[:, None] & inside, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if HAS_SHARE:
        acc *= tl.load(share_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
    target = pair if SCATTER else place
    out_at = out_ptr + target.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


@triton.jit
def _clamped_mul_kernel(gate_up_ptr, out_ptr, size, alpha, limit, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    product = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out_ptr + row * size + column, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_up_kernel(pairs_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Sum each token's TOP_K rows of pairs [T * TOP_K, size] into out [T, size], always in the same order."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(TOP_K):
        total += tl.load(pairs_ptr + (token * TOP_K + i) * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def tiling_for(pairs: int, num_experts: int, dtype: torch.dtype, *, invariant: bool) -> Tiling:
    """Tiling for a number of pairs: few pairs per expert use few rows, since experts do not share tiles. Invariant
    products use one tiling for all."""
    if dtype == torch.float32:
        return Tiling(16, 32, 32, 2)
    if invariant or not tuned() or pairs > 64 * num_experts:
        return Tiling(64, 128, 64, 4)
    return Tiling(16, 64, 128, 4) if pairs <= 16 * num_experts else Tiling(32, 128, 64, 4)


class Grouping(NamedTuple):
    """Pairs sorted by expert and the tiles of each expert, int32 on the device."""

    order: Tensor  # [pairs]
    tile_expert: Tensor  # [slots]
    tile_begin: Tensor  # [slots]
    tile_end: Tensor  # [slots]


def group_by_expert(experts: Tensor, num_experts: int, rows: int, positions: Tensor | None = None) -> Grouping:
    """Sort the T * k pairs of `experts` [T, k] by expert and split them into tiles of `rows`.

    Tokens with a position [T] below 0 are padding and in no tile; the rest of `order` is undefined.
    """
    pairs, top_k = experts.numel(), experts.shape[1]
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(3, pairs // rows + num_experts, dtype=torch.int32, device=experts.device)
    _sort_kernel[(num_experts,)](
        experts.contiguous(),
        order if positions is None else positions,
        order,
        *tiles,
        pairs,
        TOP_K=top_k,
        HAS_POSITIONS=positions is not None,
        ROWS=rows,
        BLOCK=1024,
        num_warps=4,
        **overlapping(experts.device),
    )
    return Grouping(order, *tiles)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    grouping: Grouping,
    tiling: Tiling,
    top_k: int,
    *,
    exponents: Tensor | None = None,
    scatter: bool = False,
    bias: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """Multiply every pair's row by its expert's weight [experts, N, K] transposed; returns [pairs, N].

    For x [T, K] the result is in sorted order. With `scatter`, x [pairs, K] is in sorted order, and the result in the
    order of the pairs. `bias` [experts, N] is added, then each row multiplied by its `share` [pairs]. With `exponents`
    [experts, N, K / 32], the weight is [experts, N, K / 2] bytes of 4-bit floats.
    """
    pairs, (_, columns, depth) = len(grouping.order), weight.shape
    depth *= 1 if exponents is None else 2
    out = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
    _grouped_kernel[(cdiv(columns, tiling.columns), len(grouping.tile_expert))](
        x,
        weight,
        weight if exponents is None else exponents,
        x if bias is None else bias,
        out,
        *grouping,
        x if share is None else share,
        columns,
        depth,
        TOP_K=top_k,
        SCATTER=scatter,
        HAS_BIAS=bias is not None,
        HAS_SHARE=share is not None,
        PACKED=exponents is not None,
        ROWS=tiling.rows,
        BN=tiling.columns,
        BK=tiling.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=tiling.stages,
        **overlapping(x.device),
    )
    return out


def clamped_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) [T, size] of gate_up [T, 2 * size], both clamped to the limit."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(size), 1024)
    _clamped_mul_kernel[(rows, cdiv(size, block))](
        gate_up, out, size, alpha, limit, BLOCK=block, **overlapping(gate_up.device)
    )
    return out


def add_up(pairs: Tensor, top_k: int) -> Tensor:
    """Sum each token's k rows: [T * k, size] -> [T, size]."""
    tokens, size = len(pairs) // top_k, pairs.shape[1]
    out = torch.empty(tokens, size, dtype=pairs.dtype, device=pairs.device)
    block = min(next_power_of_2(size), 1024)
    _add_up_kernel[(tokens, cdiv(size, block))](pairs, out, size, TOP_K=top_k, BLOCK=block, **overlapping(pairs.device))
    return out

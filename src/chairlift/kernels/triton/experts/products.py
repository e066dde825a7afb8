"""The products of a mixture of experts: one grid computes the tiles of all experts.

Weights are plain, 8-bit floats with a scale per row, or 4-bit floats with a power of two per 32 columns (in the order
of `layers/expert_weights.py`). Weights in fewer bits than the activations are widened in registers. Activations that
are rounded to 8 bits, too, are multiplied with 8-bit weights as they are.

With few tokens, the activation is part of the first product, and the sum over a token's experts of the second.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.experts.grouping import NO_EXPERT, Grouping
from chairlift.kernels.triton.launch import Tiling, cdiv, next_power_of_2, overlapping, tuned
from chairlift.kernels.triton.widen import widened

NO_GATE, SILU_GATE, CLAMPED_GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def _gated(both, alpha, limit, ROWS: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr):
    """[ROWS, 2 * BN], columns of gate and up in turns -> [ROWS, BN]."""
    gate, up = tl.split(tl.reshape(both, [ROWS, BN, 2]))
    if GATE == CLAMPED_GATE:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gate = gate / (1.0 + tl.exp(-alpha * gate))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up


@triton.jit
def _grouped_kernel(
    x_ptr,  # [tokens, K], or with SCATTER [pairs, K] in sorted order
    weight_ptr,  # [experts, N, K], with a gate [experts, 2 * N, K]; PACKED: K / 2 bytes per row
    scales_ptr,  # EIGHT_BITS: [experts, rows] float32; PACKED: [experts, rows, K / 32] bytes
    x_scales_ptr,  # [rows of x] float32, with ROUNDED only
    bias_ptr,  # [experts, rows], with HAS_BIAS only
    out_ptr,  # [pairs, N] in sorted order, or with SCATTER in the order of the pairs
    order_ptr,
    tile_expert_ptr,
    tile_begin_ptr,
    tile_end_ptr,
    share_ptr,  # [pairs]: with HAS_SHARE the routing weight that multiplies each row
    sums_ptr,  # [tokens, N], with SUM_TOKENS only
    arrived_ptr,  # [programs along the columns] int32, all zero between launches
    num_tokens,
    N,
    K,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    PACKED: tl.constexpr,  # 4-bit floats in the order of `layers/expert_weights.py`; BK has no effect
    EIGHT_BITS: tl.constexpr,  # the weight is in 8-bit floats
    ROUNDED: tl.constexpr,  # x is, too
    GATE: tl.constexpr,
    SUM_TOKENS: tl.constexpr,  # 0, or a bound of num_tokens: the last program adds the rows of each token
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
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if expert != NO_EXPERT:
        place = tl.load(tile_begin_ptr + slot) + tl.arange(0, ROWS)
        is_row = place < tl.load(tile_end_ptr + slot)
        pair = tl.load(order_ptr + place, mask=is_row, other=0)
        k = tl.arange(0, BK)
        if GATE == NO_GATE:
            column = n
            row = expert * N + n
        else:  # rows of gate and up in turns, so that a thread has both numbers of a column
            lane = tl.arange(0, 2 * BN)
            column = tl.program_id(0) * BN + lane // 2
            row = expert * 2 * N + column + lane % 2 * N
        inside = column < N
        source = (place if SCATTER else pair // TOP_K).to(tl.int64)
        x_at = x_ptr + source[:, None] * K
        acc = tl.zeros([ROWS, BN if GATE == NO_GATE else 2 * BN], tl.float32)
        if PACKED:
            byte = tl.arange(0, 32)
            w_at = weight_ptr + row[:, None] * (K // 2) + byte[None, :]
            scale_at = scales_ptr + row * (K // 32)
            x_at += byte[None, :]
            for chunk in range(K // 64):
                codes = tl.load(w_at + chunk * 32, mask=inside[:, None], other=0).to(tl.int32)
                low = _power_of_two(tl.load(scale_at + 2 * chunk, mask=inside, other=0))
                high = _power_of_two(tl.load(scale_at + 2 * chunk + 1, mask=inside, other=0))
                x = tl.load(x_at + chunk * 64, mask=is_row[:, None], other=0.0)
                acc = tl.dot(x, tl.trans(_dequantized(codes & 15, low, x)), acc, input_precision=PRECISION)
                x = tl.load(x_at + chunk * 64 + 32, mask=is_row[:, None], other=0.0)
                acc = tl.dot(x, tl.trans(_dequantized(codes >> 4, high, x)), acc, input_precision=PRECISION)
        else:
            w_at = weight_ptr + row[:, None] * K
            for at in range(0, K, BK):
                kk = at + k
                within = (kk < K)[None, :]
                w = tl.load(w_at + kk[None, :], mask=inside[:, None] & within, other=0.0)
                x = tl.load(x_at + kk[None, :], mask=is_row[:, None] & within, other=0.0)
                if ROUNDED:  # accumulate in float32 here: the tensor cores accumulate 8-bit products less exactly
                    acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=BK)
                else:
                    if EIGHT_BITS:
                        w = widened(w, x.dtype, OVERLAP)
                    acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if ROUNDED:
            acc *= tl.load(x_scales_ptr + source, mask=is_row, other=0.0)[:, None]
        if EIGHT_BITS:
            acc *= tl.load(scales_ptr + row, mask=inside, other=0.0)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if HAS_SHARE:
            acc *= tl.load(share_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if GATE != NO_GATE:
            acc = _gated(acc, alpha, limit, ROWS, BN, GATE)
        target = (pair if SCATTER else place).to(tl.int64)
        out_at = out_ptr + target[:, None] * N + n[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])
    if SUM_TOKENS > 0:
        tl.debug_barrier()
        counter = arrived_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != tl.num_programs(1) - 1:
            return
        tl.debug_barrier()
        tl.store(counter, 0)
        token = tl.arange(0, SUM_TOKENS)
        keep = (token < num_tokens)[:, None] & (n < N)[None, :]
        total = tl.zeros([SUM_TOKENS, BN], tl.float32)
        for i in tl.static_range(TOP_K):  # read from L2, where other multiprocessors wrote them
            term_at = out_ptr + (token * TOP_K + i)[:, None] * N + n[None, :]
            total += tl.load(term_at, mask=keep, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(sums_ptr + token[:, None] * N + n[None, :], total.to(sums_ptr.dtype.element_ty), mask=keep)


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
    return Tiling(16, 64, 128, 4) if has_few_pairs(pairs, num_experts) else Tiling(32, 128, 64, 4)


def has_few_pairs(pairs: int, num_experts: int) -> bool:
    """Whether most experts have one tile of few rows, so that reading the weights takes most of the time."""
    return pairs <= 16 * num_experts


class ExpertMatrix(NamedTuple):
    """The weights of one product of all experts, as they are multiplied."""

    numbers: Tensor  # [experts, rows, K] plain or 8-bit floats, or [experts, rows, K / 2] bytes of 4-bit floats
    scales: Tensor | None = (
        None  # of 8-bit floats [experts, rows] float32; of 4-bit floats [experts, rows, K / 32] bytes
    )

    @property
    def is_packed(self) -> bool:
        return self.numbers.dtype == torch.uint8


class Gate(NamedTuple):
    """The activation of a gated block: silu, or with a limit that of `activation.clamped_mul`."""

    alpha: float = 1.0
    limit: float | None = None


def grouped_linear(
    x: Tensor,
    weight: ExpertMatrix,
    grouping: Grouping,
    tiling: Tiling,
    top_k: int,
    *,
    x_scales: Tensor | None = None,
    gate: Gate | None = None,
    scatter: bool = False,
    bias: Tensor | None = None,
    share: Tensor | None = None,
    sum_tokens: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply every pair's row by its expert's weight [experts, N, K] transposed; returns [pairs, N].

    For x [T, K] the result is in sorted order. With `scatter`, x [pairs, K] is in sorted order, and the result in the
    order of the pairs. `bias` [experts, N] is added, then each row multiplied by its `share` [pairs].
    `x_scales`: of each row of x, which is in 8-bit floats as the weight is; the result is of `out_dtype`.
    `gate`: the weight is [experts, 2 N, K], the gate's rows first; returns the activation [pairs, N].
    `sum_tokens`, with `scatter` and few tokens: returns the sum of each token's rows [T, N].
    """
    pairs, (_, columns, depth) = len(grouping.order), weight.numbers.shape
    depth *= 2 if weight.is_packed else 1
    columns //= 1 if gate is None else 2
    kind = out_dtype or x.dtype
    out = torch.empty(pairs, columns, dtype=kind, device=x.device)
    tokens = pairs // top_k
    sums = torch.empty(tokens, columns, dtype=kind, device=x.device) if sum_tokens else out
    width = tiling.columns // (1 if gate is None else 2)
    across = cdiv(columns, width)
    _grouped_kernel[(across, len(grouping.tile_expert))](
        x,
        weight.numbers,
        weight.numbers if weight.scales is None else weight.scales,
        grouping.order if x_scales is None else x_scales,
        x if bias is None else bias,
        out,
        *grouping,
        x if share is None else share,
        sums,
        _counters(across, x.device) if sum_tokens else grouping.order,
        tokens,
        columns,
        depth,
        1.0 if gate is None else gate.alpha,
        0.0 if gate is None or gate.limit is None else gate.limit,
        TOP_K=top_k,
        SCATTER=scatter,
        HAS_BIAS=bias is not None,
        HAS_SHARE=share is not None,
        PACKED=weight.is_packed,
        EIGHT_BITS=weight.scales is not None and not weight.is_packed,
        ROUNDED=x_scales is not None,
        GATE=(NO_GATE if gate is None else SILU_GATE if gate.limit is None else CLAMPED_GATE).value,
        SUM_TOKENS=next_power_of_2(tokens) if sum_tokens else 0,
        ROWS=tiling.rows,
        BN=width,
        BK=tiling.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=tiling.stages,
        **overlapping(x.device),
    )
    return sums


@cache
def _counters(size: int, device: torch.device) -> Tensor:
    """Counters shared by all kernels of one stream, which run in sequence."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def add_up(pairs: Tensor, top_k: int) -> Tensor:
    """Sum each token's k rows: [T * k, size] -> [T, size]."""
    tokens, size = len(pairs) // top_k, pairs.shape[1]
    out = torch.empty(tokens, size, dtype=pairs.dtype, device=pairs.device)
    block = min(next_power_of_2(size), 1024)
    _add_up_kernel[(tokens, cdiv(size, block))](pairs, out, size, TOP_K=top_k, BLOCK=block, **overlapping(pairs.device))
    return out

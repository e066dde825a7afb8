"""The products of a mixture of experts: one grid computes the tiles of all experts.

Weights are plain, 8-bit floats with a scale per row, or 4-bit floats with a power of two per 32 columns (in
`microscaled.py`). Weights in fewer bits than the activations are widened in registers. Activations that are rounded to
8 bits, too, are multiplied with 8-bit weights as they are.

With few tokens, the activation is part of the first product, and the sum over a token's experts of the second.

Shared experts, which every token uses, may be further experts of the same grid. Their weights are those of one dense
block of as many times the inner size, and stay in its layout, in which steps of many tokens multiply them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.experts.microscaled import (
    CLAMPED_GATE,
    NO_GATE,
    SILU_GATE,
    add_tokens,
    counters,
    microscaled_linear,
)
from chairlift.kernels.triton.experts.routing import NO_EXPERT, Grouping
from chairlift.kernels.triton.experts.tiling import ExpertTiling, shared_stages
from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping
from chairlift.kernels.triton.widen import widened


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
def _multiply_tile(
    x_ptr, weight_ptr, scales_ptr, x_scales_ptr, bias_ptr, out_ptr, order_ptr, share_ptr, begin, end, N, K,
    stride,  # elements from one row of the weight to the next
    up_rows,  # rows of the weight from the gate to up
    alpha, limit,
    TOP_K: tl.constexpr, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARE: tl.constexpr,
    EIGHT_BITS: tl.constexpr, ROUNDED: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, EVEN_DEPTH: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The pairs from `begin` to `end`, at most ROWS, times the weight of their expert; arguments as of the kernel, with
    the weight, scales and bias of that expert."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    place = begin + tl.arange(0, ROWS)
    is_row = place < end
    pair = tl.load(order_ptr + place, mask=is_row, other=0)
    k = tl.arange(0, BK)
    if GATE == NO_GATE:
        column = n
        row = n
    else:  # rows of gate and up in turns, so that a thread has both numbers of a column
        lane = tl.arange(0, 2 * BN)
        column = tl.program_id(0) * BN + lane // 2
        row = column + lane % 2 * up_rows
    inside = column < N
    source = (place if SCATTER else pair // TOP_K).to(tl.int64)
    x_at = x_ptr + source[:, None] * K
    acc = tl.zeros([ROWS, BN if GATE == NO_GATE else 2 * BN], tl.float32)
    w_at = weight_ptr + row.to(tl.int64)[:, None] * stride
    for at in tl.range(0, K, BK, num_stages=STAGES):
        kk = at + k
        if EVEN_DEPTH:
            w = tl.load(w_at + kk[None, :], mask=inside[:, None], other=0.0)
            x = tl.load(x_at + kk[None, :], mask=is_row[:, None], other=0.0)
        else:
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


@triton.jit
def _grouped_kernel(
    x_ptr,  # [tokens, K], or with SCATTER [pairs, K] in sorted order
    weight_ptr,  # [experts, N, K], with a gate [experts, 2 * N, K]
    scales_ptr,  # [experts, rows] float32, with EIGHT_BITS only
    shared_ptr,  # shared experts: [SHARED * N, K] (with a gate twice as many rows), with SCATTER [N, SHARED * K]
    shared_scales_ptr,  # [rows] float32
    x_scales_ptr,  # [rows of x] float32, with ROUNDED only
    bias_ptr,  # [experts, rows], with HAS_BIAS only
    out_ptr,  # [pairs, N] sorted, or with SCATTER in the order of the pairs; SUM_TOKENS: in float32
    order_ptr,
    tile_expert_ptr,
    tile_begin_ptr,
    tile_end_ptr,
    share_ptr,  # [pairs]: with HAS_SHARE the routing weight that multiplies each row
    sums_ptr,  # [tokens, N], with SUM_TOKENS only; with RESIDUAL the sums are added to it
    squares_ptr,  # [tokens, programs along the columns] float32, with RESIDUAL only
    arrived_ptr,  # [programs along the columns] int32, all zero between launches
    num_tokens,
    num_experts,  # without the shared ones, which are behind them
    N,
    K,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    EIGHT_BITS: tl.constexpr,  # the weight is in 8-bit floats
    ROUNDED: tl.constexpr,  # x is, too
    GATE: tl.constexpr,
    SUM_TOKENS: tl.constexpr,  # 0, or a bound of num_tokens: the last program adds the rows of each token
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED_STAGES: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(1)
    if SHARED > 0:  # the larger tiles first, so that none of them is left at the end
        slot = tl.num_programs(1) - 1 - slot
    expert = tl.load(tile_expert_ptr + slot).to(tl.int64)
    begin = tl.load(tile_begin_ptr + slot)
    end = tl.load(tile_end_ptr + slot)
    if (expert != NO_EXPERT) & (expert < num_experts):
        rows = N if GATE == NO_GATE else 2 * N
        _multiply_tile(
            x_ptr, weight_ptr + expert * rows * K, scales_ptr + expert * rows, x_scales_ptr, bias_ptr + expert * rows,
            out_ptr, order_ptr, share_ptr, begin, end, N, K, K, N, alpha, limit, TOP_K, SCATTER, HAS_BIAS, HAS_SHARE,
            EIGHT_BITS, ROUNDED, GATE, ROWS, BN, BK, STAGES, EVEN_DEPTH, PRECISION, OVERLAP,
        )  # fmt: skip
    if SHARED > 0:  # noqa: SIM102 - known when the kernel is compiled, unlike the next condition
        if expert >= num_experts:
            first = (expert - num_experts) * (K if SCATTER else N * K)
            first_row = 0 if SCATTER else (expert - num_experts) * N
            stride = SHARED * K if SCATTER else K
            _multiply_tile(
                x_ptr, shared_ptr + first, shared_scales_ptr + first_row, x_scales_ptr, bias_ptr, out_ptr, order_ptr,
                share_ptr, begin, end, N, K, stride, SHARED * N, alpha, limit, TOP_K, SCATTER, False, HAS_SHARE,
                EIGHT_BITS, ROUNDED, GATE, SHARED_ROWS, BN, BK, SHARED_STAGES, EVEN_DEPTH, PRECISION, OVERLAP,
            )  # fmt: skip
    if SUM_TOKENS > 0:
        tl.debug_barrier()
        counter = arrived_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != tl.num_programs(1) - 1:
            return
        tl.debug_barrier()
        tl.store(counter, 0)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        add_tokens(out_ptr, sums_ptr, squares_ptr, n, num_tokens, N, TOP_K, 1, SUM_TOKENS, RESIDUAL, BN)


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


class ExpertMatrix(NamedTuple):
    """The weights of one product of all experts, as they are multiplied."""

    numbers: Tensor  # [experts, rows, K] plain or 8-bit floats; of 4-bit floats the words of `layers/expert_weights.py`
    scales: Tensor | None = None  # 8-bit floats: [experts, rows] float32; 4-bit floats: their exponents

    @property
    def is_microscaled(self) -> bool:
        return self.numbers.dtype == torch.int16


class SharedMatrix(NamedTuple):
    """The weights of one product of the experts that every token uses, in one matrix, as of a dense block."""

    numbers: Tensor  # [experts * N, K], with a gate [2 * experts * N, K]; of the second product [N, experts * K]
    scales: Tensor | None  # Each row of 8-bit floats has one.
    num_experts: int


class Gate(NamedTuple):
    """The activation of a gated block: silu, or with a limit that of `activation.clamped_mul`."""

    alpha: float = 1.0
    limit: float | None = None


def grouped_linear(
    x: Tensor, weight: ExpertMatrix, grouping: Grouping, tiling: ExpertTiling, top_k: int, **options: Any
) -> Tensor:
    """The result of `grouped_product` alone."""
    return grouped_product(x, weight, grouping, tiling, top_k, **options)[0]


def grouped_product(
    x: Tensor,
    weight: ExpertMatrix,
    grouping: Grouping,
    tiling: ExpertTiling,
    top_k: int,
    *,
    shared: SharedMatrix | None = None,
    shared_rows: int = 0,
    x_scales: Tensor | None = None,
    gate: Gate | None = None,
    scatter: bool = False,
    bias: Tensor | None = None,
    share: Tensor | None = None,
    sum_tokens: bool = False,
    add_to: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Multiply every pair's row by its expert's weight [experts, N, K] transposed; returns [pairs, N], and with
    `add_to` the partial sums of squares of its rows.

    For x [T, K] the result is in sorted order. With `scatter`, x [pairs, K] is in sorted order, and the result in the
    order of the pairs. `bias` [experts, N] is added, then each row multiplied by its `share` [pairs].
    `top_k`: the experts of a token. `shared`: those of them that are behind the others by number, which have tiles of
    `shared_rows`.
    `x_scales`: of each row of x, which is in 8-bit floats as the weight is; the result is of `out_dtype`.
    `gate`: the weight is [experts, 2 N, K], the gate's rows first; returns the activation [pairs, N].
    `sum_tokens`, with `scatter` and few tokens: returns the sum of each token's rows [T, N].
    `add_to` [T, N], with `sum_tokens`: the sums are added to it in place.
    """
    assert shared is None or shared_rows >= tiling.rows
    if weight.is_microscaled:
        assert weight.scales is not None
        assert x_scales is None
        assert shared is None
        return microscaled_linear(
            x, weight.numbers, weight.scales, grouping, tiling, top_k, gate=gate, scatter=scatter, bias=bias,
            share=share, sum_tokens=sum_tokens, add_to=add_to,
        )  # fmt: skip
    pairs, (_, columns, depth) = len(grouping.order), weight.numbers.shape
    columns //= 1 if gate is None else 2
    kind = out_dtype or x.dtype
    tokens = pairs // top_k
    width = tiling.columns // (1 if gate is None else 2)
    across = cdiv(columns, width)
    out = torch.empty(pairs, columns, dtype=torch.float32 if sum_tokens else kind, device=x.device)
    sums, squares = out, None
    if add_to is not None:
        sums, squares = add_to, torch.empty(tokens, across, dtype=torch.float32, device=x.device)
    elif sum_tokens:
        sums = torch.empty(tokens, columns, dtype=kind, device=x.device)
    assert tiling.splits == 1
    assert shared is None or bias is None
    of_shared = weight if shared is None else shared
    _grouped_kernel[(across, len(grouping.tile_expert))](
        x,
        weight.numbers,
        weight.numbers if weight.scales is None else weight.scales,
        of_shared.numbers,
        of_shared.numbers if of_shared.scales is None else of_shared.scales,
        grouping.order if x_scales is None else x_scales,
        x if bias is None else bias,
        out,
        *grouping,
        x if share is None else share,
        sums,
        x if squares is None else squares,
        counters(across, x.device),
        tokens,
        len(weight.numbers),
        columns,
        depth,
        1.0 if gate is None else gate.alpha,
        0.0 if gate is None or gate.limit is None else gate.limit,
        TOP_K=top_k,
        SHARED=0 if shared is None else shared.num_experts,
        SCATTER=scatter,
        HAS_BIAS=bias is not None,
        HAS_SHARE=share is not None,
        EIGHT_BITS=weight.scales is not None,
        ROUNDED=x_scales is not None,
        GATE=(NO_GATE if gate is None else SILU_GATE if gate.limit is None else CLAMPED_GATE).value,
        SUM_TOKENS=next_power_of_2(tokens) if sum_tokens else 0,
        RESIDUAL=squares is not None,
        ROWS=tiling.rows,
        SHARED_ROWS=shared_rows,
        BN=width,
        BK=tiling.depth,
        STAGES=tiling.stages,
        SHARED_STAGES=shared_stages(tiling, shared_rows),
        EVEN_DEPTH=depth % tiling.depth == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlapping(x.device),
    )
    return sums, squares


def add_up(pairs: Tensor, top_k: int) -> Tensor:
    """Sum each token's k rows: [T * k, size] -> [T, size]."""
    tokens, size = len(pairs) // top_k, pairs.shape[1]
    out = torch.empty(tokens, size, dtype=pairs.dtype, device=pairs.device)
    block = min(next_power_of_2(size), 1024)
    _add_up_kernel[(tokens, cdiv(size, block))](pairs, out, size, TOP_K=top_k, BLOCK=block, **overlapping(pairs.device))
    return out

"""The products of experts in 4-bit floats (MXFP4), which are dequantized in registers, exactly.

`packed` of layers/expert_weights.py says how they lie in memory. A number's bits, moved to those of a bfloat16, are the
number times 2 ** -126, subnormal ones included; one product with its group's scale, two numbers at a time, makes it the
weight, times 2 ** -64 to stay within the range of bfloat16. Weights are the left operand, so that few rows of
activations make small tiles.

With SUM_TOKENS, the last program to finish adds the results of all experts of a token. Then each expert's sum may be
split among several programs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.experts.routing import NO_EXPERT, Grouping
from chairlift.kernels.triton.experts.tiling import ExpertTiling
from chairlift.kernels.triton.launch import cdiv, has_asm, next_power_of_2, overlapping

NO_GATE, SILU_GATE, CLAMPED_GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PANEL = tl.constexpr(16)  # It is the PANEL of `layers/expert_weights.py`.
RUN = tl.constexpr(32)
UNSCALED = tl.constexpr(2.0**64)  # what the products are multiplied by where they were scaled


@triton.jit
def _factor(exponents, GROUP: tl.constexpr):
    """The scale of one of four groups of each row, as a bfloat16: a byte as its exponent."""
    bits = exponents << 7 if GROUP == 0 else exponents >> (8 * GROUP - 7)
    return (bits & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _numbers(words, exponents, like, GROUP: tl.constexpr, SIGN: tl.constexpr, REST: tl.constexpr):
    """The weights of one of four groups, in the type of `like`, without PTX."""
    code = (words.to(tl.int32) >> REST) & 7
    exponent = code >> 1
    mantissa = code & 1
    doubled = tl.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    signed = tl.where(((words.to(tl.int32) >> SIGN) & 1) != 0, -doubled, doubled).to(tl.float32)
    scale = (((exponents >> (8 * GROUP)) & 255) << 23).to(tl.float32, bitcast=True) * 2.0**-63
    return (signed * scale[:, None]).to(like.dtype)


@triton.jit
def _weights(words, exponents, like, ASM: tl.constexpr):
    """The weights of a chunk: four tiles of the shape of `words`."""
    if ASM and like.dtype == tl.bfloat16:
        shape: tl.constexpr = words.shape
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, none;
            mov.b32 none, 0x80008000;
            and.b32 t, $4, 0x81c081c0;
            fma.rn.bf16x2 $0, t, $5, none;
            shl.b32 t, $4, 3;
            and.b32 t, t, 0x81c081c0;
            fma.rn.bf16x2 $1, t, $6, none;
            shr.u32 u, $4, 3;
            and.b32 u, u, 0x01c001c0;
            shl.b32 t, $4, 1;
            lop3.b32 t, t, 0x80008000, u, 0xea;
            fma.rn.bf16x2 $2, t, $7, none;
            shl.b32 u, $4, 6;
            and.b32 u, u, 0x01c001c0;
            shl.b32 t, $4, 2;
            lop3.b32 t, t, 0x80008000, u, 0xea;
            fma.rn.bf16x2 $3, t, $8, none;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [
                words,
                tl.broadcast_to(_factor(exponents, 0)[:, None], shape),
                tl.broadcast_to(_factor(exponents, 1)[:, None], shape),
                tl.broadcast_to(_factor(exponents, 2)[:, None], shape),
                tl.broadcast_to(_factor(exponents, 3)[:, None], shape),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a = _numbers(words, exponents, like, 0, 15, 6)
        b = _numbers(words, exponents, like, 1, 12, 3)
        c = _numbers(words, exponents, like, 2, 14, 9)
        d = _numbers(words, exponents, like, 3, 13, 0)
    return a, b, c, d


@triton.jit
def _plus_chunk(acc, words, exponents, x0, x1, x2, x3, PRECISION: tl.constexpr, ASM: tl.constexpr):
    a, b, c, d = _weights(words, exponents, x0, ASM)
    acc = tl.dot(a, tl.trans(x0), acc, input_precision=PRECISION)
    acc = tl.dot(b, tl.trans(x1), acc, input_precision=PRECISION)
    acc = tl.dot(c, tl.trans(x2), acc, input_precision=PRECISION)
    return tl.dot(d, tl.trans(x3), acc, input_precision=PRECISION)


@triton.jit
def add_tokens(
    terms_ptr, sums_ptr, squares_ptr, n, num_tokens, N,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, RESIDUAL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the terms [SPLITS, pairs, N] of each token in order, read from L2 where other multiprocessors wrote them.
    RESIDUAL: add the sums to `sums_ptr`, and write the sums of squares that the next norm needs."""
    token = tl.arange(0, TOKENS)
    keep = (token < num_tokens)[:, None] & (n < N)[None, :]
    sums = tl.zeros([TOKENS, BN], tl.float32)
    for i in tl.static_range(TOP_K * SPLITS):
        term = i // TOP_K * num_tokens * TOP_K + token * TOP_K + i % TOP_K
        sums += tl.load(terms_ptr + term[:, None] * N + n[None, :], mask=keep, other=0.0, cache_modifier=".cg")
    sums_at = sums_ptr + token[:, None] * N + n[None, :]
    if RESIDUAL:
        sums += tl.load(sums_at, mask=keep, other=0.0).to(tl.float32)
    rounded = sums.to(sums_ptr.dtype.element_ty)
    tl.store(sums_at, rounded, mask=keep)
    if RESIDUAL:
        kept = tl.where(keep, rounded.to(tl.float32), 0.0)
        squares_at = squares_ptr + token * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares_at, tl.sum(kept * kept, 1), mask=token < num_tokens)


@triton.jit
def _microscaled_kernel(
    x_ptr,  # [tokens, K], or with SCATTER [pairs, K] in sorted order
    words_ptr,  # int16 [experts, N / PANEL, chunks, PANEL, RUN]; with a gate 2 N rows, the gate's first
    exponents_ptr,  # int32 [experts, chunks, rows]
    bias_ptr,  # [experts, rows], with HAS_BIAS only
    out_ptr,  # [pairs, N] sorted, or with SCATTER in the order of the pairs; SUM_TOKENS: float32 [SPLITS, pairs, N]
    order_ptr,
    tile_expert_ptr,
    tile_begin_ptr,
    tile_end_ptr,
    share_ptr,  # [pairs]: with HAS_SHARE the routing weight that multiplies each row
    sums_ptr,  # [tokens, N], with SUM_TOKENS only; with RESIDUAL the sums are added to it
    squares_ptr,  # [tokens, programs along the columns] float32, with RESIDUAL only
    arrived_ptr,  # [programs along the columns] int32, all zero between launches
    num_tokens,
    N,
    K,
    chunks,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    GATE: tl.constexpr,
    SUM_TOKENS: tl.constexpr,  # 0, or a bound of num_tokens: the last program adds the rows of each token
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,  # columns of the result
    SPLITS: tl.constexpr,  # more than 1 with SUM_TOKENS only
    STAGES: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    slot = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    column = n % N  # those past the end read others, and their results are dropped
    total = N if GATE == NO_GATE else 2 * N
    per_split = tl.cdiv(chunks, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    row_words = chunks * RUN
    panel_at = words_ptr + (column // PANEL).to(tl.int64) * row_words * PANEL
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(tile_expert_ptr + slot).to(tl.int64)
    if expert != NO_EXPERT:
        place = tl.load(tile_begin_ptr + slot) + tl.arange(0, ROWS)
        is_row = place < tl.load(tile_end_ptr + slot)
        pair = tl.load(order_ptr + place, mask=is_row, other=0)
        source = (place if SCATTER else pair // TOP_K).to(tl.int64)
        e = tl.arange(0, RUN)
        w_at = panel_at + expert * total * row_words + (column % PANEL) * RUN
        up_at = w_at + N.to(tl.int64) * row_words
        s_at = exponents_ptr + expert * chunks * total + column
        x_at = x_ptr + source[:, None] * K + e[None, :]
        acc = tl.zeros([BN, ROWS], tl.float32)
        up = tl.zeros([BN, ROWS], tl.float32)
        for chunk in tl.range(begin, end, num_stages=STAGES):
            k = chunk * (4 * RUN)
            words = tl.load(w_at[:, None] + chunk * (PANEL * RUN) + e[None, :])
            exponents = tl.load(s_at + chunk * total)
            if GATE != NO_GATE:
                up_words = tl.load(up_at[:, None] + chunk * (PANEL * RUN) + e[None, :])
                up_exponents = tl.load(s_at + chunk * total + N)
            if EVEN_DEPTH:
                x0 = tl.load(x_at + k, mask=is_row[:, None], other=0.0)
                x1 = tl.load(x_at + k + RUN, mask=is_row[:, None], other=0.0)
                x2 = tl.load(x_at + k + 2 * RUN, mask=is_row[:, None], other=0.0)
                x3 = tl.load(x_at + k + 3 * RUN, mask=is_row[:, None], other=0.0)
            else:  # groups are whole: a tile of x is within a row or behind it
                x0 = tl.load(x_at + k, mask=is_row[:, None], other=0.0)
                x1 = tl.load(x_at + k + RUN, mask=(is_row & (k + RUN < K))[:, None], other=0.0)
                x2 = tl.load(x_at + k + 2 * RUN, mask=(is_row & (k + 2 * RUN < K))[:, None], other=0.0)
                x3 = tl.load(x_at + k + 3 * RUN, mask=(is_row & (k + 3 * RUN < K))[:, None], other=0.0)
            acc = _plus_chunk(acc, words, exponents, x0, x1, x2, x3, PRECISION, ASM)
            if GATE != NO_GATE:
                up = _plus_chunk(up, up_words, up_exponents, x0, x1, x2, x3, PRECISION, ASM)
        SCALED: tl.constexpr = ASM and x_ptr.dtype.element_ty == tl.bfloat16
        if SCALED:
            acc *= UNSCALED
            up *= UNSCALED

        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * total + column).to(tl.float32)
            if SPLITS > 1:  # part of one of the parts
                bias = tl.where(split == 0, bias, 0.0)
            acc += bias[:, None]
            if GATE != NO_GATE:
                up += tl.load(bias_ptr + expert * total + N + column).to(tl.float32)[:, None]
        if HAS_SHARE:
            share = tl.load(share_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[None, :]
            acc *= share
            up *= share
        if GATE == CLAMPED_GATE:
            gate = tl.minimum(acc, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
            acc = gate / (1.0 + tl.exp(-alpha * gate)) * up
        elif GATE == SILU_GATE:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        target = (pair if SCATTER else place).to(tl.int64)
        if SUM_TOKENS > 0:
            target += split * num_tokens * TOP_K
        out_at = out_ptr + target[:, None] * N + n[None, :]
        tl.store(out_at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])
    if SUM_TOKENS > 0:
        tl.debug_barrier()
        counter = arrived_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != tl.num_programs(1) * SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counter, 0)
        add_tokens(out_ptr, sums_ptr, squares_ptr, n, num_tokens, N, TOP_K, SPLITS, SUM_TOKENS, RESIDUAL, BN)


def microscaled_linear(
    x: Tensor,
    words: Tensor,
    exponents: Tensor,
    grouping: Grouping,
    tiling: ExpertTiling,
    top_k: int,
    *,
    gate: tuple[float, float | None] | None,
    scatter: bool,
    bias: Tensor | None,
    share: Tensor | None,
    sum_tokens: bool,
    add_to: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """As `products.grouped_linear`, for 4-bit floats."""
    pairs, (_, chunks, rows), depth = len(grouping.order), exponents.shape, x.shape[1]
    columns = rows if gate is None else rows // 2
    width = tiling.columns if gate is None else tiling.columns // 2
    tokens, slots = pairs // top_k, len(grouping.tile_expert)
    across = cdiv(columns, width)
    kind = torch.float32 if sum_tokens else x.dtype
    out = torch.empty(tiling.splits if sum_tokens else 1, pairs, columns, dtype=kind, device=x.device)
    sums, squares = out[0], None
    if add_to is not None:
        sums, squares = add_to, torch.empty(tokens, across, dtype=torch.float32, device=x.device)
    elif sum_tokens:
        sums = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    assert tiling.splits == 1 or sum_tokens
    _microscaled_kernel[(across, slots, tiling.splits)](
        x,
        words,
        exponents,
        x if bias is None else bias,
        out,
        *grouping,
        x if share is None else share,
        sums,
        x if squares is None else squares,
        counters(across, x.device),
        tokens,
        columns,
        depth,
        chunks,
        1.0 if gate is None else gate[0],
        0.0 if gate is None or gate[1] is None else gate[1],
        TOP_K=top_k,
        SCATTER=scatter,
        HAS_BIAS=bias is not None,
        HAS_SHARE=share is not None,
        GATE=(NO_GATE if gate is None else SILU_GATE if gate[1] is None else CLAMPED_GATE).value,
        SUM_TOKENS=next_power_of_2(tokens) if sum_tokens else 0,
        RESIDUAL=squares is not None,
        ROWS=tiling.rows,
        BN=width,
        SPLITS=tiling.splits,
        STAGES=tiling.stages,
        EVEN_DEPTH=depth % (4 * RUN.value) == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ASM=has_asm(x.device),
        num_warps=tiling.warps,
        **overlapping(x.device),
    )
    return sums, squares


@cache
def counters(size: int, device: torch.device) -> Tensor:
    """Counters shared by all kernels of one stream, which run in sequence."""
    return torch.zeros(size, dtype=torch.int32, device=device)

"""The product of a single row with 4-bit weights, added to the residual stream.

Tensor cores multiply at least 8 rows of activations. The sum of a single row is cut into up to 8 parts, and the parts
take the place of the rows: a program multiplies every part of some rows of the weight by every part of the activations,
keeps the products of a part with itself and adds them up. So the warps of a program share a sum, and no partial sums go
through memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.kernels.triton.int4.kernel import PANEL, plus_chunk
from chairlift.kernels.triton.launch import prefetch_rows

COLUMNS = tl.constexpr(8)  # parts that tensor cores multiply at once


@triton.jit
def _prefetch_words(
    words_ptr, row, per_part, chunks, N, row_words,
    ROWS: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first chunks of each part into L2, a piece by each thread."""
    RUNS: tl.constexpr = ROWS // PANEL * PARTS
    PIECES: tl.constexpr = THREADS // RUNS if THREADS > RUNS else 1
    lane = tl.arange(0, RUNS * PIECES)
    run = lane // PIECES
    panel = (row + run // PARTS * PANEL) % N // PANEL
    size = chunks * (PANEL * H * 2)  # bytes
    piece = tl.cdiv(size, PIECES * 16) * 16
    at = lane % PIECES * piece
    start = (panel.to(tl.int64) * row_words + run % PARTS * per_part * H) * (PANEL * 2) + at
    prefetch_rows(words_ptr.to(tl.int64) + start, tl.maximum(tl.minimum(size - at, piece), 0))


@triton.jit
def _prefetch_scales(scales_ptr, row, count, N, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Prefetch the scales of some rows of the weight into L2, a group of columns by each thread."""
    lane = tl.arange(0, THREADS)
    size = tl.maximum(tl.minimum(N - row, ROWS), 0) * 4
    prefetch_rows(
        scales_ptr.to(tl.int64) + (lane.to(tl.int64) * N + row) * 4, tl.where(lane < count, size, 0)
    )  # fmt: skip


@triton.jit
def _own_products(acc, part, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Add up the products of a part of the weight with the same part of the activations."""
    own = tl.sum(tl.where(part[:, None] == tl.arange(0, COLUMNS)[None, :], acc, 0.0), 1)
    return tl.sum(tl.reshape(own, [PARTS, ROWS]), 0)


@triton.jit
def int4_row_kernel(
    x_ptr,  # [K]
    words_ptr,  # int16 [N / PANEL, CHUNKS, PANEL, H]
    scales_ptr,  # int32 [groups or pairs of groups, N]
    bias_ptr,  # [N]
    out_ptr,  # [N]: the product is added to it
    next_norm_ptr,  # [N]: the weight of the norm that follows, with SCALED
    scaled_ptr,  # [N]: the result times `next_norm_ptr`, with SCALED
    squares_out_ptr,  # [programs] float32: partial sums of squares of the result, for the next norm
    N,
    row_words,  # words of a row: CHUNKS * H
    ROWS: tl.constexpr,  # of the weight
    PARTS: tl.constexpr,  # of the sum; CHUNKS is a multiple of it
    H: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a chunk
    OFFSETS: tl.constexpr,
    HALF: tl.constexpr,  # scales are float16, not bfloat16
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # chunks of each part that are prefetched before the previous kernel has ended
    THREADS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    e = tl.arange(0, H)
    place = tl.arange(0, PARTS * ROWS)  # every row of the weight once for each part
    part = place // ROWS
    rows = (block * ROWS + place % ROWS) % N  # rows past the end read others, and their results are dropped
    per_part = row_words // H // PARTS
    FINE: tl.constexpr = GROUPS if OFFSETS else GROUPS // 2  # rows of scales in a chunk
    w_at = words_ptr + (rows // PANEL).to(tl.int64) * row_words * PANEL + (rows % PANEL + part * per_part * PANEL) * H
    s_at = scales_ptr + rows + part * per_part * FINE * N
    n = block * ROWS + tl.arange(0, ROWS)
    inside = n < N
    if SCALED:
        next_norm = tl.load(next_norm_ptr + n % N).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + n % N).to(tl.float32)
    if OVERLAP:
        if PREFETCH > 0:
            ahead = tl.minimum(per_part, PREFETCH)
            _prefetch_words(words_ptr, block * ROWS, per_part, ahead, N, row_words, ROWS, PARTS, H, THREADS)
            _prefetch_scales(scales_ptr, block * ROWS, per_part * PARTS * FINE, N, ROWS, THREADS)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    before = tl.load(out_ptr + n, mask=inside, other=0.0).to(tl.float32)  # needed at the end
    BASE: tl.constexpr = 1024.0 if x_ptr.dtype.element_ty == tl.float16 else 128.0
    p = tl.arange(0, COLUMNS)
    x_at = x_ptr + p[:, None] * (per_part * 4 * H) + e[None, :]
    is_part = (p < PARTS)[:, None]
    acc = tl.zeros([PARTS * ROWS, COLUMNS], tl.float32)
    for chunk in tl.range(0, per_part, num_stages=STAGES):
        k = chunk * (4 * H)
        words = tl.load(w_at[:, None] + chunk * (PANEL * H) + e[None, :])
        x0 = tl.load(x_at + k, mask=is_part, other=0.0)
        x1 = tl.load(x_at + k + H, mask=is_part, other=0.0)
        x2 = tl.load(x_at + k + 2 * H, mask=is_part, other=0.0)
        x3 = tl.load(x_at + k + 3 * H, mask=is_part, other=0.0)
        acc = plus_chunk(
            acc, words, s_at, chunk * GROUPS, N, x0, x1, x2, x3, acc, acc, acc, acc, GROUPS, OFFSETS, HALF, BASE,
            False, False, ASM,
        )  # fmt: skip
    total = _own_products(acc, part, ROWS, PARTS)
    if BIAS:
        total += bias
    rounded = (total + before).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, rounded, mask=inside)
    if SCALED:
        tl.store(scaled_ptr + n, (rounded.to(tl.float32) * next_norm).to(scaled_ptr.dtype.element_ty), mask=inside)
    kept = tl.where(inside, rounded.to(tl.float32), 0.0)
    tl.store(squares_out_ptr + block, tl.sum(kept * kept, 0))

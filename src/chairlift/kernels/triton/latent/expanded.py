"""The expanded form of latent attention: the tokens of a prompt chunk over each other; and values of the absorbed form.

Keys and values of all heads are computed from the chunk's latents before, and lie in the rows of the batch, not in the
cache. A key has a part of its own for each head and a rotated part that all heads share; values have another size. The
kernel joins its result with that of the cached context before the chunk (absorbed.py), if there is one. Behind the
absorbed form, another kernel turns sums of latents of few rows into sums of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import LOG2_E, Chunks, precision_for
from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping


@triton.jit
def _expanded_kernel(
    q_ptr,  # [T, HEADS, NOPE + ROPE]
    kv_ptr,  # [T, HEADS, NOPE + VALUE]
    rope_ptr,  # [T, ROPE]: the keys' part that all heads share
    out_ptr,  # [T, HEADS, VALUE]: with a context, its result; replaced by that of both
    lse_ptr,  # [T, HEADS] float32, in log 2: of the context
    tile_chunk_ptr,  # [tiles] int32, -1 for none
    tile_offset_ptr,
    chunk_row_ptr,  # [chunks] int32
    chunk_start_ptr,
    chunk_count_ptr,
    q_stride,
    kv_stride,
    rope_stride,
    scale_log2,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,  # QUERIES, at least 16
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Later tiles of a prompt see more keys: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    chunk = tl.load(tile_chunk_ptr + tile)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if chunk < 0:
        return
    offset = tl.load(tile_offset_ptr + tile)
    first_row = tl.load(chunk_row_ptr + chunk).to(tl.int64)
    start = tl.load(chunk_start_ptr + chunk)
    count = tl.minimum(tl.load(chunk_count_ptr + chunk) - offset, QUERIES)

    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, NOPE_PADDED)
    p = tl.arange(0, ROPE_PADDED)
    v = tl.arange(0, VALUE_PADDED)
    is_row = m < count
    in_nope = (d < NOPE)[None, :]
    in_rope = (p < ROPE)[None, :]
    in_value = (v < VALUE)[None, :]
    row = first_row + offset + m
    q_at = q_ptr + row[:, None] * q_stride + head * (NOPE + ROPE)
    q = tl.load(q_at + d[None, :], mask=is_row[:, None] & in_nope, other=0.0)
    q_rope = tl.load(q_at + NOPE + p[None, :], mask=is_row[:, None] & in_rope, other=0.0)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VALUE_PADDED], tl.float32)
    kv_at = kv_ptr + first_row * kv_stride + head * (NOPE + VALUE)
    rope_at = rope_ptr + first_row * rope_stride
    for at in range(0, offset + count, N):
        place = at + n
        inside = (place < offset + count)[:, None]
        key = tl.load(kv_at + place[:, None] * kv_stride + d[None, :], mask=inside & in_nope, other=0.0)
        rope = tl.load(rope_at + place[:, None] * rope_stride + p[None, :], mask=inside & in_rope, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision=PRECISION) * scale_log2
        # Rows beyond the chunk's end see its first token: a softmax over nothing would be NaN.
        scores = tl.where(place[None, :] <= (offset + m)[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(kv_at + place[:, None] * kv_stride + NOPE + v[None, :], mask=inside & in_value, other=0.0)
        acc = tl.dot(weights.to(q.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        best = new_best
    out_at = out_ptr + (row * HEADS + head)[:, None] * VALUE + v[None, :]
    keep = is_row[:, None] & in_value
    result = acc / total[:, None]
    if start > 0:
        other_lse = tl.load(lse_ptr + row * HEADS + head, mask=is_row, other=0.0)
        other = tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp2(other_lse - best - tl.log2(total)))
        result = result * share[:, None] + other * (1.0 - share)[:, None]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=keep)


def attend_within_chunks(
    q: Tensor, kv: Tensor, rope: Tensor, out: Tensor, lse: Tensor, *, chunks: Chunks, scale: float
) -> None:
    """Attention of the tokens of chunks over each other, joined with that over their contexts.

    q [T, heads, nope + rope]; kv [T, heads, nope + value]; rope [T, rope]; out [T, heads, value] and lse [T, heads]
    have the results for chunks with a context, from `attend_contexts`.
    """
    _, num_heads, _ = q.shape
    rope_dim, value_dim = rope.shape[1], out.shape[2]
    nope_dim = q.shape[2] - rope_dim
    small = q.dtype == torch.float32
    _expanded_kernel[(num_heads, len(chunks.tile_chunk))](
        q,
        kv,
        rope,
        out,
        lse,
        chunks.tile_chunk,
        chunks.tile_offset,
        chunks.row,
        chunks.start,
        chunks.count,
        q.stride(0),
        kv.stride(0),
        rope.stride(0),
        scale * LOG2_E,
        HEADS=num_heads,
        NOPE=nope_dim,
        NOPE_PADDED=max(16, next_power_of_2(nope_dim)),
        ROPE=rope_dim,
        ROPE_PADDED=max(16, next_power_of_2(rope_dim)),
        VALUE=value_dim,
        VALUE_PADDED=max(16, next_power_of_2(value_dim)),
        QUERIES=chunks.tile_queries,
        M=max(16, chunks.tile_queries),
        N=16 if small else 64,
        PRECISION=precision_for(q.dtype),
        num_warps=4,
        num_stages=1 if small else 2,
        **overlapping(q.device),
    )


MOST_ROWS = 32  # A tile has no more.
COLUMNS = 32  # A program multiplies this many of a head's values.


@triton.jit(do_not_specialize=["T"])
def _values_kernel(
    sums_ptr,  # [T, HEADS, RANK]
    up_ptr,  # [HEADS, NOPE + VALUE, RANK]: the last rows of each head are those of values
    out_ptr,  # [T, HEADS, VALUE]
    T,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1)
    column = tl.program_id(2) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK_PADDED)
    up_at = up_ptr + (head * (NOPE + VALUE) + NOPE + column)[:, None] * RANK + r[None, :]
    up = tl.load(up_at, mask=(column < VALUE)[:, None] & (r < RANK)[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = m.to(tl.int64) * HEADS + head
    sums = tl.load(sums_ptr + row[:, None] * RANK + r[None, :], mask=(m < T)[:, None] & (r < RANK)[None, :], other=0.0)
    found = tl.dot(sums, tl.trans(up), input_precision=PRECISION)
    out_at = out_ptr + row[:, None] * VALUE + column[None, :]
    tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=(m < T)[:, None] & (column < VALUE)[None, :])


def values_of(sums: Tensor, up: Tensor, nope_dim: int) -> Tensor:
    """Sums of latents [T, heads, rank] as sums of values [T, heads, value], by up [heads, nope + value, rank]."""
    rows, num_heads, rank = sums.shape
    value_dim = up.shape[1] - nope_dim
    out = empty_rows(rows, num_heads, value_dim, dtype=sums.dtype, device=sums.device)
    height = min(MOST_ROWS, max(16, next_power_of_2(rows)))
    columns = min(COLUMNS, max(16, next_power_of_2(value_dim)))
    _values_kernel[(cdiv(rows, height), num_heads, cdiv(value_dim, columns))](
        sums,
        up,
        out,
        rows,
        HEADS=num_heads,
        NOPE=nope_dim,
        VALUE=value_dim,
        RANK=rank,
        RANK_PADDED=max(16, next_power_of_2(rank)),
        BM=height,
        BN=columns,
        PRECISION=precision_for(sums.dtype),
        num_warps=4,
        **overlapping(sums.device),
    )
    return out

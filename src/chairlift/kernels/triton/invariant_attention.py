"""Batch-invariant paged attention: a token's result is bit for bit the same alone, in any batch and for any chunking.

A context is split into spans that begin at fixed positions; each is summed separately, and the spans are merged in
order. A tile of queries of a chunk computes its spans in sequence. Several programs may share the spans of a single
token, in a kernel of its own with the same arithmetic (`invariant_decode.py`). Masked positions add exact zeros.

Spans of the first positions are short, so that programs which share a short context have little to read each; they get
longer with their position, since scratch memory holds the results of all spans.

Sums over a row have an order of their own, whatever the layout of a tile. Whether the hardware multiplies tiles of any
height alike is tried at startup (`small_tiles_agree`). Where it does not, single tokens have the tile of chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import (
    Chunks,
    Scoring,
    cap_scores,
    first_visible,
    in_type_of,
    load_tile,
    places,
    sinks_of,
    strides,
)
from chairlift.kernels.triton.launch import next_power_of_2, num_halvings, overlapping, pairwise_sum, tuned

SHORTEST_SPAN = 128  # positions
PROGRAMS = 256  # Steps of few single tokens have 256; two per context are slower than one with 32 requests and 8 heads.
FEWEST_ROWS = 16  # Tensor cores multiply no fewer.
KEYS = 32  # A tile has this many; sums have another order with another number.


@triton.jit
def span_of(position, SPAN: tl.constexpr):
    """The span of a position. The first 16 have SPAN positions each; then every 8 are twice as long as those before."""
    above = tl.maximum(position // (8 * SPAN), 1).to(tl.float32)
    doublings = (above.to(tl.int32, bitcast=True) >> 23) - 127  # the exponent
    return 8 * doublings + position // (SPAN << doublings)


@triton.jit
def span_begin(span, SPAN: tl.constexpr):
    """The first position of a span."""
    doublings = tl.maximum(span // 8 - 1, 0)
    return (span - 8 * doublings) * (SPAN << doublings)


@triton.jit
def merged(best, total, acc, more_best, more_total, more_acc):
    """Merge one more span into a running softmax (maximum, sum of weights, weighted sum of values)."""
    new_best = tl.maximum(best, more_best)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # no visible key so far: avoid NaN
    shrink = tl.exp2(best - safe)
    weight = tl.exp2(more_best - safe)
    return new_best, total * shrink + more_total * weight, acc * shrink[:, None] + more_acc * weight[:, None]


@triton.jit
def _row_sum(x):
    """Sum the rows of x, first over groups of 8 columns, which are in different registers of a thread, then within."""
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])
    for _ in tl.static_range(num_halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2, 8]), 2)
    return pairwise_sum(tl.reshape(x, [x.shape[0], 8]))


@triton.jit
def take_in(q, k, v, visible, best, total, acc, scale_log2, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Update the running softmax of a span with one tile of keys and values."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    left = scale_log2
    if SOFTCAP > 0:
        scores = cap_scores(scores * scale_log2, SOFTCAP)
        left = 1.0
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * left)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(tl.fma(scores, left, -safe[:, None]))
    shrink = tl.exp2(best - safe)
    total = total * shrink + _row_sum(weights)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_best, total, acc


@triton.jit
def _attention_kernel(
    q_ptr,  # [T, heads, D]
    keys_ptr,  # [blocks, block_size, kv_heads, D]
    values_ptr,
    out_ptr,  # [T, heads, D]
    sinks_ptr,  # [heads] float32, with SINKS only
    tables_ptr,  # [slots, table_stride] int32
    tile_chunk_ptr,  # [tiles] int32: the chunk a tile belongs to, or -1
    tile_offset_ptr,  # [tiles] int32: its first query, counted from the chunk's first
    chunk_slot_ptr,  # [chunks] int32
    chunk_row_ptr,  # [chunks] int32: the batch row of the chunk's first token
    chunk_start_ptr,  # [chunks] int32: the position of that token
    chunk_count_ptr,  # [chunks] int32
    q_stride,
    out_stride,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    SPAN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNKED: tl.constexpr,  # attention stays within chunks of `window` positions
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # later tiles have longer contexts: start them first
    head = tl.program_id(0)
    chunk = tl.load(tile_chunk_ptr + tile)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if chunk < 0:
        return
    length = tl.load(chunk_count_ptr + chunk)
    offset = tl.load(tile_offset_ptr + tile)
    slot = tl.load(chunk_slot_ptr + chunk).to(tl.int64)
    row = tl.load(chunk_row_ptr + chunk) + offset
    start = tl.load(chunk_start_ptr + chunk) + offset
    end = start + tl.minimum(length - offset, QUERIES)
    begin = tl.maximum(first_visible(start, window, CHUNKED), 0) // N * N

    ROWS: tl.constexpr = QUERIES * GROUP_PADDED  # all query heads of token 0, of token 1, ...
    m = tl.arange(0, ROWS)
    d = tl.arange(0, D_PADDED)
    n = tl.arange(0, N)
    token = m // GROUP_PADDED
    in_head = d < D
    keep = ((start + token < end) & (m % GROUP_PADDED < GROUP))[:, None] & in_head[None, :]
    q_place = (row + token).to(tl.int64)
    q_head = head * GROUP + m % GROUP_PADDED
    q = tl.load(q_ptr + q_place[:, None] * q_stride + q_head[:, None] * D + d[None, :], mask=keep, other=0.0)
    table = tables_ptr + slot * table_stride
    seen_by = (start + token)[:, None]  # last visible position of each row
    head_offset = head * D + d
    # The sinks are merged before all spans, whatever the window: a row's sum then has one order in every tile.
    sink, one_sink = sinks_of(sinks_ptr, q_head, m % GROUP_PADDED < GROUP, SINKS)
    all_best, all_total = sink, one_sink
    all_acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    span = span_of(begin, SPAN)
    next_begin = span_begin(span + 1, SPAN)
    inside = begin + n < end
    place = places(table, begin + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
    for at in range(begin, end, N):
        if at == next_begin:  # a span has ended
            all_best, all_total, all_acc = merged(all_best, all_total, all_acc, best, total, acc)
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, D_PADDED], tl.float32)
            span += 1
            next_begin = span_begin(span + 1, SPAN)
        k, v = load_tile(keys_ptr, values_ptr, place, head_offset, inside, in_head, False)
        # Load the block table of the next tile while this one is computed.
        inside = at + N + n < end
        place = places(table, at + N + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        position = (at + n)[None, :]
        visible = (position <= seen_by) & (position >= first_visible(seen_by, window, CHUNKED))
        best, total, acc = take_in(
            q, in_type_of(k, q), in_type_of(v, q), visible, best, total, acc, scale_log2, SOFTCAP, PRECISION
        )
    all_best, all_total, all_acc = merged(all_best, all_total, all_acc, best, total, acc)
    all_total = tl.where(all_total == 0.0, 1.0, all_total)
    out_at = out_ptr + q_place[:, None] * out_stride + q_head[:, None] * D + d[None, :]
    tl.store(out_at, (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


def num_spans(longest: int, span: int) -> int:
    """Spans of a context of `longest` tokens, as `span_of` counts them."""
    last = longest - 1
    doublings = max(last // (8 * span), 1).bit_length() - 1
    return 8 * doublings + last // (span << doublings) + 1


def queries_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens per query tile of a chunk."""
    rows = 64 if dtype != torch.float32 and head_dim <= 128 else 32
    group = next_power_of_2(num_heads // num_kv_heads)
    return max(FEWEST_ROWS // group, rows // group, 1)


class SpanScratch:
    """Results of the spans of single tokens that several programs share; all layers of a shape share it."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, longest: int, device: torch.device) -> None:
        self.span = SHORTEST_SPAN
        self.spans = num_spans(longest, self.span)
        self._kv_heads = num_kv_heads
        contexts = max(PROGRAMS // 2, num_kv_heads)  # Each program has a context of its own if there are more.
        rows = contexts * self.spans * (num_heads // num_kv_heads)
        self.partial = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
        self.best, self.total = torch.empty(2, rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(contexts, dtype=torch.int32, device=device)

    def programs(self, rows: int) -> int:
        """Programs that share a context in a step of `rows` single tokens."""
        return 1 if not tuned() else min(self.spans, max(1, PROGRAMS // (rows * self._kv_heads)))


def invariant_attention(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, chunks: Chunks, scoring: Scoring) -> None:
    """Attention of prompt chunks, split into tiles; q, out [T, heads, D]."""
    _, num_heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    _attention_kernel[(kv_heads, len(chunks.tile_chunk))](
        q,
        keys,
        values,
        out,
        q if scoring.sinks is None else scoring.sinks,
        *chunks.tensors,
        *strides(q, out, keys, chunks.tables),
        *scoring.numbers,
        GROUP=group,
        GROUP_PADDED=next_power_of_2(group),
        QUERIES=chunks.tile_queries,
        D=dim,
        D_PADDED=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=block_size,
        N=KEYS,
        SPAN=SHORTEST_SPAN,
        num_warps=4,
        num_stages=1 if q.dtype == torch.float32 else 3 if dim <= 128 else 2,  # Shared memory has no room for more.
        enable_fp_fusion=False,  # the kernel of single tokens must round the same way
        **scoring.constants(q.dtype),
        **overlapping(q.device),
    )

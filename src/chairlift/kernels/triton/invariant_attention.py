"""Batch-invariant paged attention: a token's result is bit for bit the same alone, in any batch and for any chunking.

One kernel with one tile serves single tokens and chunks. A context is split into spans that begin at fixed positions;
each is summed separately, and the spans are added in order. A single token has one program per span, so that long
contexts fill the GPU; a tile of a longer chunk computes its spans in sequence with the same arithmetic. Masked
positions add exact zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import LOG2_E, first_visible, in_type_of, scores_of, sinks_of
from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping

SHORTEST_SPAN = 512
MOST_SPANS = 32  # programs per tile; those without a span cost a little


@triton.jit
def _merged(best, total, acc, lse, part):
    """Merge one more span into a running softmax (maximum, sum of weights, weighted sum of values)."""
    new_best = tl.maximum(best, lse)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # no visible key so far: avoid NaN
    shrink = tl.exp2(best - safe)
    weight = tl.exp2(lse - safe)
    return new_best, total * shrink + weight, acc * shrink[:, None] + part * weight[:, None]


@triton.jit
def _attention_kernel(
    q_ptr,  # [T, heads, D]
    keys_ptr,  # [blocks, block_size, kv_heads, D]
    values_ptr,
    out_ptr,  # [T, heads, D]
    partial_ptr,  # [tiles, kv_heads, spans, GROUP_PADDED, D] float32
    lse_ptr,  # [tiles, kv_heads, spans, GROUP_PADDED] float32, in log 2
    arrived_ptr,  # [tiles, kv_heads] int32, all zero between steps
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
    # Launches with several programs per tile serve chunks of a single token.
    side_by_side = tl.num_programs(2) > 1
    length = tl.load(chunk_count_ptr + chunk)
    if side_by_side & (length != 1):
        return
    offset = tl.load(tile_offset_ptr + tile)
    slot = tl.load(chunk_slot_ptr + chunk).to(tl.int64)
    row = tl.load(chunk_row_ptr + chunk) + offset
    start = tl.load(chunk_start_ptr + chunk) + offset
    end = start + tl.minimum(length - offset, QUERIES)
    begin = tl.maximum(first_visible(start, window, CHUNKED), 0) // N * N
    first_span = begin // SPAN
    num_spans = tl.cdiv(end, SPAN) - first_span
    from_span = first_span + tl.where(side_by_side, tl.program_id(2), 0)
    to_span = tl.where(side_by_side, from_span + 1, first_span + num_spans)
    if from_span >= first_span + num_spans:
        return

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
    is_part = side_by_side & (num_spans > 1)
    all_best = tl.where(is_part, float("-inf"), sink)
    all_total = tl.where(is_part, 0.0, one_sink)
    all_acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    for span in range(from_span, to_span):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PADDED], tl.float32)
        for at in range(tl.maximum(span * SPAN, begin), tl.minimum((span + 1) * SPAN, end), N):
            position = at + n
            inside = position < end
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            place = block * kv_block_stride + (position % BLOCK_SIZE) * kv_token_stride
            mask = inside[:, None] & in_head[None, :]
            k = in_type_of(tl.load(keys_ptr + place[:, None] + head_offset[None, :], mask=mask, other=0.0), q)
            v = in_type_of(tl.load(values_ptr + place[:, None] + head_offset[None, :], mask=mask, other=0.0), q)
            scores = scores_of(q, tl.trans(k), scale_log2, SOFTCAP, PRECISION)
            lowest = first_visible(seen_by, window, CHUNKED)
            visible = (position[None, :] <= seen_by) & (position[None, :] >= lowest)
            scores = tl.where(visible, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(best - safe)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
            best = new_best
        lse = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        part = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        all_best, all_total, all_acc = _merged(all_best, all_total, all_acc, lse, part)

    if is_part:
        most_spans = tl.num_programs(2)
        tile_place = tile.to(tl.int64) * tl.num_programs(0) + head
        one = m < GROUP_PADDED  # a single token has only these rows
        lse_at = lse_ptr + tile_place * most_spans * GROUP_PADDED + m
        part_at = partial_ptr + (tile_place * most_spans * GROUP_PADDED + m[:, None]) * D + d[None, :]
        mine = tl.program_id(2) * GROUP_PADDED
        tl.store(lse_at + mine, all_best, mask=one)
        tl.store(part_at + mine * D, all_acc, mask=one[:, None] & in_head[None, :])
        tl.debug_barrier()
        counter = arrived_ptr + tile_place
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != num_spans - 1:
            return
        tl.debug_barrier()
        tl.store(counter, 0)
        all_best, all_total = sink, one_sink
        all_acc = tl.zeros([ROWS, D_PADDED], tl.float32)
        for other in range(num_spans):
            theirs = other * GROUP_PADDED
            lse = tl.load(lse_at + theirs, mask=one, other=float("-inf"), volatile=True)
            part = tl.load(part_at + theirs * D, mask=one[:, None] & in_head[None, :], other=0.0, volatile=True)
            all_best, all_total, all_acc = _merged(all_best, all_total, all_acc, lse, part)
    all_total = tl.where(all_total == 0.0, 1.0, all_total)
    out_at = out_ptr + q_place[:, None] * out_stride + q_head[:, None] * D + d[None, :]
    tl.store(out_at, (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


def span_for(longest: int) -> int:
    """Positions per span for contexts of up to `longest` tokens; the same for all requests of an engine."""
    return max(SHORTEST_SPAN, next_power_of_2(cdiv(longest, MOST_SPANS)))


def queries_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens per query tile; smaller than prompts alone would need, since a single token occupies a whole tile."""
    rows = 64 if dtype != torch.float32 and head_dim <= 128 else 32
    group = next_power_of_2(num_heads // num_kv_heads)
    return max(16 // group, rows // group, 1)  # a matrix product has at least 16 rows


class SpanScratch:
    """Partial results of the spans of up to `tiles` single tokens, shared by all layers."""

    def __init__(
        self, tiles: int, num_heads: int, num_kv_heads: int, head_dim: int, longest: int, device: torch.device
    ) -> None:
        self.span = span_for(longest)
        self.spans = max(2, cdiv(longest, self.span))  # 1 would select the kernel for chunks of any length
        self.chunks = torch.arange(tiles, dtype=torch.int32, device=device)  # tile i is chunk i
        self.offsets = torch.zeros(tiles, dtype=torch.int32, device=device)
        rows = tiles * num_kv_heads * self.spans * next_power_of_2(num_heads // num_kv_heads)
        self.partial = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles * num_kv_heads, dtype=torch.int32, device=device)


def invariant_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    tables: Tensor,
    tile_chunk: Tensor,
    tile_offset: Tensor,
    tile_queries: int,
    chunk_slot: Tensor,
    chunk_row: Tensor,
    chunk_start: Tensor,
    chunk_count: Tensor,
    scratch: SpanScratch,
    singles: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of q, out [T, heads, D] in the tiles `tile_chunk` and `tile_offset`; with `singles`, only of chunks of
    a single token."""
    _, num_heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    _attention_kernel[(kv_heads, len(tile_chunk), scratch.spans if singles else 1)](
        q,
        keys,
        values,
        out,
        scratch.partial,
        scratch.lse,
        scratch.arrived,
        q if sinks is None else sinks,
        tables,
        tile_chunk,
        tile_offset,
        chunk_slot,
        chunk_row,
        chunk_start,
        chunk_count,
        q.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        tables.stride(0),
        scale * LOG2_E if softcap is None else scale / softcap,
        chunk or window or 2**30,
        GROUP=group,
        GROUP_PADDED=next_power_of_2(group),
        QUERIES=tile_queries,
        D=dim,
        D_PADDED=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=block_size,
        N=64 if q.dtype != torch.float32 else 32,
        SPAN=scratch.span,
        SOFTCAP=softcap or 0.0,
        CHUNKED=chunk is not None,
        SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2 if q.dtype != torch.float32 else 1,
        enable_fp_fusion=False,  # both paths through the kernel must round the same way
        **overlapping(q.device),
    )

"""Batch-invariant paged attention of single new tokens: one or several programs per (token, key head).

The arithmetic is that of `invariant_attention.py`: spans that begin at fixed positions are summed separately and
merged in order. A program has consecutive spans; with one program per token they are merged as they end, with several
the last program to finish merges all of them. In a step of single tokens only, the kernel also normalises and rotates
queries and keys, and stores the new key and value before it reads the end of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import (
    Chunks,
    Scoring,
    first_visible,
    in_type_of,
    load_tile,
    places,
    sinks_of,
    strides,
)
from chairlift.kernels.triton.decode import Fresh
from chairlift.kernels.triton.decode_kernel import load_heads, load_norm, load_rotation, norm_and_rotate
from chairlift.kernels.triton.invariant_attention import (
    FEWEST_ROWS,
    KEYS,
    SpanScratch,
    invariant_attention,
    merged,
    queries_per_tile,
    span_begin,
    span_of,
    take_in,
)
from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping, prefetch_rows, tuned


@triton.jit
def _store_new(k, v, place, keys_ptr, values_ptr, one, KV_LIMIT: tl.constexpr):
    """Store the new token's key and value, with the roundings of `rotate_and_store_`."""
    if KV_LIMIT > 0:  # keep NaN: clamping would turn it into a number
        k = tl.clamp(k, -KV_LIMIT, KV_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        v = tl.clamp(v, -KV_LIMIT, KV_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(keys_ptr + place, k.to(keys_ptr.dtype.element_ty), mask=one)
    tl.store(values_ptr + place, v.to(values_ptr.dtype.element_ty), mask=one)


@triton.jit
def _store_span(partial_ptr, best_ptr, total_ptr, at, m, d, best, total, acc, GROUP: tl.constexpr, D: tl.constexpr):
    """Keep the result of a span for the program that merges all of them."""
    in_group = m < GROUP
    tl.store(best_ptr + at * GROUP + m, best, mask=in_group)
    tl.store(total_ptr + at * GROUP + m, total, mask=in_group)
    part_at = partial_ptr + (at * GROUP + m[:, None]) * D + d[None, :]
    tl.store(part_at, acc, mask=in_group[:, None] & (d < D)[None, :])


@triton.jit
def _merged_spans(
    partial_ptr, best_ptr, total_ptr, at, num_spans, m, d, best, total, acc, GROUP: tl.constexpr, D: tl.constexpr
):
    """Merge the results of all spans, read from L2 where other multiprocessors wrote them."""
    in_group = m < GROUP
    keep = in_group[:, None] & (d < D)[None, :]
    for span in tl.range(num_spans, loop_unroll_factor=4):  # keeps several loads in flight
        place = (at + span) * GROUP + m
        more_best = tl.load(best_ptr + place, mask=in_group, other=float("-inf"), cache_modifier=".cg")
        more_total = tl.load(total_ptr + place, mask=in_group, other=0.0, cache_modifier=".cg")
        more = tl.load(partial_ptr + place[:, None] * D + d[None, :], mask=keep, other=0.0, cache_modifier=".cg")
        best, total, acc = merged(best, total, acc, more_best, more_total, more)
    return best, total, acc


@triton.jit
def invariant_decode_kernel(
    q_ptr,  # [rows, heads, D]; FRESH: [rows, heads + 2 * kv_heads, D], as the projection made them
    keys_ptr,  # [blocks, block_size, kv_heads, D]
    values_ptr,
    out_ptr,  # [rows, heads, D]
    partial_ptr,  # [rows, kv_heads, MOST_SPANS, GROUP, D] float32, with SHARED; so are the next three
    best_ptr,  # [rows, kv_heads, MOST_SPANS, GROUP] float32, in log 2
    total_ptr,  # the same
    arrived_ptr,  # [rows, kv_heads] int32, all zero between steps
    tables_ptr,  # [slots, table_stride] int32
    row_slot_ptr,  # [rows] int32: row of the block tables
    row_start_ptr,  # [rows] int32: position of the row's token
    row_count_ptr,  # [rows] int32: 1, or another number if the row is not of a single token
    q_norm_ptr,  # [D]; this and the next three with FRESH only
    k_norm_ptr,
    cos_ptr,  # [rows, PAIRS]
    sin_ptr,
    sinks_ptr,  # [heads] float32, with SINKS only
    eps,
    q_stride,
    out_stride,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    SPAN: tl.constexpr,
    MOST_SPANS: tl.constexpr,  # Scratch memory has room for this many of a context.
    SHARED: tl.constexpr,  # several programs share a context
    FRESH: tl.constexpr,  # the new token's key and value are not in the cache yet
    PAIRS: tl.constexpr,  # half of the rotated elements of a head
    HAS_NORM: tl.constexpr,
    KV_LIMIT: tl.constexpr,  # largest value of the cache type, 0 if no clamp is needed
    PREFETCH: tl.constexpr,  # positions whose keys and values are prefetched before the previous kernel has ended
    SOFTCAP: tl.constexpr,
    CHUNKED: tl.constexpr,  # attention stays within chunks of `window` positions
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_heads = tl.num_programs(0)
    # Issue all three loads together: each has the latency of a key tile.
    count = tl.load(row_count_ptr + row)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    last = tl.load(row_start_ptr + row)
    first = tl.maximum(first_visible(last, window, CHUNKED), 0)
    span = span_of(first, SPAN)
    end_span = span_of(last, SPAN) + 1
    num_spans = end_span - span
    programs = 1
    if SHARED:  # consecutive spans that begin within this program's share of the positions
        programs = tl.minimum(tl.num_programs(2), num_spans)
        begin_at = span_begin(span, SPAN)
        share = tl.cdiv(last + 1 - begin_at, programs)
        start_span = span
        mine = tl.program_id(2)
        span = tl.where(mine == 0, span, span_of(begin_at + mine * share - 1, SPAN) + 1)
        end_span = tl.minimum(end_span, span_of(begin_at + (mine + 1) * share - 1, SPAN) + 1)
    has_work = count == 1
    if SHARED:
        has_work = has_work & (tl.program_id(2) < programs)
    # Tiles begin at multiples of N, so that windows do not change the order of sums.
    begin = tl.maximum(span_begin(span, SPAN), first // N * N)
    end = tl.minimum(span_begin(end_span, SPAN), last + 1)
    m = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    n = tl.arange(0, N)
    in_head = d < D
    in_group = m < GROUP
    table = tables_ptr + slot * table_stride
    head_offset = head * D + d
    if OVERLAP:
        if PREFETCH > 0:  # keys of earlier steps were written before the previous kernel started
            position = begin + tl.arange(0, PREFETCH)
            old = (position < tl.minimum(end, last)) & has_work
            offset = places(table, position, old, kv_block_stride, kv_token_stride, BLOCK_SIZE) + head * D
            size = tl.where(old, D * (keys_ptr.dtype.element_ty.primitive_bitwidth // 8), 0)
            prefetch_rows(keys_ptr + offset, size)
            prefetch_rows(values_ptr + offset, size)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if has_work == 0:
        return

    q_heads = head * GROUP + m
    keep = in_group[:, None] & in_head[None, :]
    q_at = q_ptr + row.to(tl.int64) * q_stride
    if FRESH:  # loads come before sums, whose threads wait for each other
        kind: tl.constexpr = q_ptr.dtype.element_ty
        x, y = load_heads(q_at + q_heads[:, None] * D, d, keep, PAIRS)
        weight, of_partner = load_norm(q_norm_ptr, d, D, PAIRS, HAS_NORM)
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, d, PAIRS)
        if (end == last + 1) & (begin < end):
            one = in_head[None, :]
            k_at = q_at + (num_heads * GROUP + head + tl.arange(0, 1))[:, None] * D
            k, partner = load_heads(k_at, d, one, PAIRS)
            v = tl.load(k_at + num_heads * D + d[None, :], mask=one, other=0.0).to(tl.float32)
            k_weight, k_of_partner = load_norm(k_norm_ptr, d, D, PAIRS, HAS_NORM)
            block = tl.load(table + last // BLOCK_SIZE).to(tl.int64)
            place = block * kv_block_stride + (last % BLOCK_SIZE) * kv_token_stride + head_offset[None, :]
            k = norm_and_rotate(k, partner, k_weight, k_of_partner, cos, sin, eps, kind, D, PAIRS, HAS_NORM)
            _store_new(k, v, place, keys_ptr, values_ptr, one, KV_LIMIT)
            tl.debug_barrier()  # all threads of this program see them
        q = norm_and_rotate(x, y, weight, of_partner, cos, sin, eps, kind, D, PAIRS, HAS_NORM).to(kind)
    else:
        q = tl.load(q_at + q_heads[:, None] * D + d[None, :], mask=keep, other=0.0)
    all_best, all_total = sinks_of(sinks_ptr, q_heads, in_group, SINKS)
    all_acc = tl.zeros([M, D_PADDED], tl.float32)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PADDED], tl.float32)
    context = row * num_heads + head
    scratch_at = context * MOST_SPANS
    if SHARED:
        scratch_at -= start_span
    next_begin = span_begin(span + 1, SPAN)
    inside = begin + n < end
    offset = places(table, begin + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
    for at in range(begin, end, N):
        if at == next_begin:  # a span has ended
            if SHARED:
                _store_span(partial_ptr, best_ptr, total_ptr, scratch_at + span, m, d, best, total, acc, GROUP, D)
            else:
                all_best, all_total, all_acc = merged(all_best, all_total, all_acc, best, total, acc)
            best = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, D_PADDED], tl.float32)
            span += 1
            next_begin = span_begin(span + 1, SPAN)
        k, v = load_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head, False)
        visible = (inside & (at + n >= first))[None, :]
        inside = at + N + n < end
        offset = places(table, at + N + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        best, total, acc = take_in(
            q, in_type_of(k, q), in_type_of(v, q), visible, best, total, acc, scale_log2, SOFTCAP, PRECISION
        )

    if SHARED and programs > 1:
        if begin < end:
            _store_span(partial_ptr, best_ptr, total_ptr, scratch_at + span, m, d, best, total, acc, GROUP, D)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + context, 1, sem="acq_rel", scope="gpu") != programs - 1:
            return
        tl.debug_barrier()
        tl.store(arrived_ptr + context, 0)
        all_best, all_total, all_acc = _merged_spans(
            partial_ptr, best_ptr, total_ptr, context * MOST_SPANS, num_spans, m, d, all_best, all_total, all_acc,
            GROUP, D,
        )  # fmt: skip
    else:
        all_best, all_total, all_acc = merged(all_best, all_total, all_acc, best, total, acc)
    all_total = tl.where(all_total == 0.0, 1.0, all_total)
    out_at = out_ptr + row.to(tl.int64) * out_stride + q_heads[:, None] * D + d[None, :]
    tl.store(out_at, (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


class SingleTiling(NamedTuple):
    """How single tokens are computed; none of it changes a bit."""

    warps: int
    stages: int
    prefetch: int = 0  # positions, a power of two


def single_tiling(contexts: int, head_dim: int, dtype: torch.dtype, *, shared: bool) -> SingleTiling:
    """The best of 15 on an H200 with 1, 32 (by whole steps) and 128 requests, 8 key heads of 128 numbers."""
    if dtype == torch.float32:
        return SingleTiling(4, 1)
    if head_dim > 128:  # two sums take twice as many registers
        return SingleTiling(4, 2)
    if shared:
        return SingleTiling(4, 3, prefetch=64)
    return SingleTiling(2, 3, prefetch=64) if contexts <= 512 and tuned() else SingleTiling(1, 2)


def can_begin_fresh(head_dim: int, fresh: Fresh) -> bool:
    """Whether the kernel computes all that `rotate_and_store_` does, and sums the squares of a head in its order."""
    if fresh.v_norm:
        return False
    if fresh.q_norm is None:
        return True
    return next_power_of_2(head_dim) == head_dim and (fresh.cos is None or 2 * fresh.cos.shape[-1] == head_dim)


def invariant_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    tables: Tensor,
    row_slot: Tensor,
    row_start: Tensor,
    row_count: Tensor,
    scratch: SpanScratch,
    tile_queries: int = 1,
    programs: int | None = None,
    scoring: Scoring,
    fresh: Fresh | None = None,
    tiling: SingleTiling | None = None,
) -> None:
    """Attention of rows 0 .. len(row_slot) - 1 of `q` [T, heads, D] that are single tokens; writes these rows of `out`.

    With `fresh`, `q` is the projection [T, heads + 2 * kv_heads, D]; the new keys and values are written to the cache.
    `tile_queries`: that a tile has room for, as that of a chunk where a smaller one has other bits. `programs` share a
    context, by default as many as fill the GPU.
    """
    rows, (_, num_heads, dim) = len(row_slot), out.shape
    _, block_size, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    tile_rows = max(FEWEST_ROWS, next_power_of_2(group) * tile_queries)
    programs = programs or scratch.programs(rows)
    assert programs == 1 or rows * kv_heads <= len(scratch.arrived)
    tiling = tiling or single_tiling(rows * kv_heads, dim, q.dtype, shared=programs > 1)
    q_norm, k_norm, eps, cos, sin, *_ = fresh or Fresh(None, None, 0.0, None, None)
    prefetches = dim * keys.element_size() % 16 == 0  # needs 16-byte alignment
    # Heads of one row are neighbours in the grid, since their keys are neighbours in memory.
    invariant_decode_kernel[(kv_heads, rows, programs)](
        q,
        keys,
        values,
        out,
        scratch.partial,
        scratch.best,
        scratch.total,
        scratch.arrived,
        tables,
        row_slot,
        row_start,
        row_count,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q if cos is None else cos,
        q if sin is None else sin,
        q if scoring.sinks is None else scoring.sinks,
        eps,
        *strides(q, out, keys, tables),
        *scoring.numbers,
        GROUP=group,
        M=tile_rows,
        D=dim,
        D_PADDED=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=block_size,
        N=KEYS,
        SPAN=scratch.span,
        MOST_SPANS=scratch.spans,
        SHARED=programs > 1,
        FRESH=fresh is not None,
        PAIRS=0 if cos is None else cos.shape[-1],
        HAS_NORM=q_norm is not None,
        KV_LIMIT=torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else 0.0,
        PREFETCH=tiling.prefetch if prefetches else 0,
        num_warps=min(4, tiling.warps * tile_rows // FEWEST_ROWS) if tile_queries == 1 else 4,
        num_stages=tiling.stages,
        enable_fp_fusion=False,  # the kernel of chunks must round the same way
        **scoring.constants(q.dtype),
        **overlapping(q.device),
    )


def small_tiles_agree(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether single tokens get the same bits in a tile of their own as in that of a chunk, on random numbers."""
    starts, block_size = (0, 63, 64, 200, 511), 16
    longest = max(starts) + 1
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q = numbers(len(starts), num_heads, head_dim)
    keys, values = (numbers(cdiv(longest, block_size), block_size, kv_heads, head_dim) for _ in range(2))
    places, counts = integers(range(len(starts))), integers([1] * len(starts))
    tables = torch.arange(len(keys), dtype=torch.int32, device=device).repeat(len(starts), 1)
    scratch = SpanScratch(num_heads, kv_heads, head_dim, longest, device)
    alone, in_chunks = torch.empty_like(q), torch.empty_like(q)
    queries, scoring = queries_per_tile(num_heads, kv_heads, head_dim, dtype), Scoring(head_dim**-0.5)
    chunks = Chunks(tables, places, torch.zeros_like(places), places, places, integers(starts), counts, queries)
    rows: dict[str, Any] = {"tables": tables, "row_slot": places, "row_start": chunks.start, "row_count": counts}
    invariant_decode(q, keys, values, alone, **rows, scratch=scratch, scoring=scoring)
    invariant_attention(q, keys, values, in_chunks, chunks, scoring)
    return alone.equal(in_chunks)

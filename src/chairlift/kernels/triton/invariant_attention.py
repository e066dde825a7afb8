"""Batch-invariant paged attention: a token's result is bit for bit the same alone, in any batch and for any chunking.

A context is split into spans that begin at fixed positions; each is summed separately, and the spans are added in
order. Several programs share the spans of a single token, so that long contexts fill the GPU; a tile of a longer chunk
computes its spans in sequence with the same arithmetic. Masked positions add exact zeros.

A tile of a single token has 16 rows, since most of a larger one would be padding; that of a chunk has 64. A warp has 16
rows in either, so that sums over a row have one order; whether the hardware multiplies both alike is tried at startup
(`small_tiles_agree`). Where it does not, single tokens have the tile of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import LOG2_E, first_visible, in_type_of, scores_of, sinks_of
from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping

SHORTEST_SPAN = 256  # positions; shorter ones fill the GPU with fewer requests, but chunks add up more of them
MOST_SPANS = 32  # scratch memory holds all spans of all single tokens of a step
PROGRAMS = 512  # of a step with few single tokens: about four per multiprocessor of a Hopper GPU, of one warp each
FEWEST_ROWS = 16  # that tensor cores multiply


@triton.jit
def _merged(best, total, acc, more_best, more_total, more_acc):
    """Merge one more span into a running softmax (maximum, sum of weights, weighted sum of values)."""
    new_best = tl.maximum(best, more_best)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # no visible key so far: avoid NaN
    shrink = tl.exp2(best - safe)
    weight = tl.exp2(more_best - safe)
    return new_best, total * shrink + more_total * weight, acc * shrink[:, None] + more_acc * weight[:, None]


@triton.jit
def _attention_kernel(
    q_ptr,  # [T, heads, D]
    keys_ptr,  # [blocks, block_size, kv_heads, D]
    values_ptr,
    out_ptr,  # [T, heads, D]
    partial_ptr,  # [tiles, kv_heads, spans, GROUP_PADDED, D] float32
    best_ptr,  # [tiles, kv_heads, spans, GROUP_PADDED] float32, in log 2
    total_ptr,  # [tiles, kv_heads, spans, GROUP_PADDED] float32
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
    MOST_SPANS: tl.constexpr,  # of a context, which scratch memory has room for
    SINGLES: tl.constexpr,  # only chunks of a single token
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
    if SINGLES:  # noqa: SIM102 - decided when the kernel is compiled
        if length != 1:
            return
    offset = tl.load(tile_offset_ptr + tile)
    slot = tl.load(chunk_slot_ptr + chunk).to(tl.int64)
    row = tl.load(chunk_row_ptr + chunk) + offset
    start = tl.load(chunk_start_ptr + chunk) + offset
    end = start + tl.minimum(length - offset, QUERIES)
    begin = tl.maximum(first_visible(start, window, CHUNKED), 0) // N * N
    first_span = begin // SPAN
    num_spans = tl.cdiv(end, SPAN) - first_span
    programs = tl.num_programs(2)  # one for chunks
    if tl.program_id(2) >= num_spans:
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
    all_best, all_total = sink, one_sink
    all_acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    shares = (programs > 1) & (num_spans > 1)  # with other programs
    one = m < GROUP_PADDED  # a single token has only these rows
    tile_place = tile.to(tl.int64) * tl.num_programs(0) + head
    place_at = tile_place * MOST_SPANS * GROUP_PADDED + m
    part_at = partial_ptr + place_at[:, None] * D + d[None, :]
    for span in range(first_span + tl.program_id(2), first_span + num_spans, programs):
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
        if shares:
            mine = (span - first_span) * GROUP_PADDED
            tl.store(best_ptr + place_at + mine, best, mask=one)
            tl.store(total_ptr + place_at + mine, total, mask=one)
            tl.store(part_at + mine * D, acc, mask=one[:, None] & in_head[None, :])
        else:
            all_best, all_total, all_acc = _merged(all_best, all_total, all_acc, best, total, acc)

    if shares:
        tl.debug_barrier()
        counter = arrived_ptr + tile_place
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != tl.minimum(programs, num_spans) - 1:
            return
        tl.debug_barrier()
        tl.store(counter, 0)
        for other in range(num_spans):
            theirs = other * GROUP_PADDED
            best = tl.load(best_ptr + place_at + theirs, mask=one, other=float("-inf"), volatile=True)
            total = tl.load(total_ptr + place_at + theirs, mask=one, other=0.0, volatile=True)
            acc = tl.load(part_at + theirs * D, mask=one[:, None] & in_head[None, :], other=0.0, volatile=True)
            all_best, all_total, all_acc = _merged(all_best, all_total, all_acc, best, total, acc)
    all_total = tl.where(all_total == 0.0, 1.0, all_total)
    out_at = out_ptr + q_place[:, None] * out_stride + q_head[:, None] * D + d[None, :]
    tl.store(out_at, (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


def span_for(longest: int) -> int:
    """Positions per span for contexts of up to `longest` tokens; the same for all requests of an engine."""
    return max(SHORTEST_SPAN, next_power_of_2(cdiv(longest, MOST_SPANS)))


def queries_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens per query tile of a chunk."""
    rows = 64 if dtype != torch.float32 and head_dim <= 128 else 32
    group = next_power_of_2(num_heads // num_kv_heads)
    return max(FEWEST_ROWS // group, rows // group, 1)


class SpanScratch:
    """Partial results of the spans of up to `tiles` single tokens, shared by all layers."""

    def __init__(
        self, tiles: int, num_heads: int, num_kv_heads: int, head_dim: int, longest: int, device: torch.device
    ) -> None:
        self.span = span_for(longest)
        self.spans = cdiv(longest, self.span)
        self.chunks = torch.arange(tiles, dtype=torch.int32, device=device)  # tile i is chunk i
        self.offsets = torch.zeros(tiles, dtype=torch.int32, device=device)
        rows = tiles * num_kv_heads * self.spans * next_power_of_2(num_heads // num_kv_heads)
        self.partial = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
        self.best, self.total = torch.empty(2, rows, dtype=torch.float32, device=device)
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
    small_tiles: bool = True,
    programs: int | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of q, out [T, heads, D] in the tiles `tile_chunk` and `tile_offset` of `tile_queries` tokens.

    `singles`: only of chunks of a single token, in tiles of their own with `small_tiles`, each shared by some programs.
    """
    _, num_heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    padded = next_power_of_2(group)
    rows, warps = tile_queries * padded, 4
    if singles and small_tiles and q.dtype != torch.float32:
        rows = max(FEWEST_ROWS, padded)
        warps = min(4, rows // FEWEST_ROWS)
    if not singles:
        programs = 1
    elif programs is None:
        programs = min(scratch.spans, max(1, PROGRAMS // (len(tile_chunk) * kv_heads)))
    _attention_kernel[(kv_heads, len(tile_chunk), programs)](
        q,
        keys,
        values,
        out,
        scratch.partial,
        scratch.best,
        scratch.total,
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
        GROUP_PADDED=padded,
        QUERIES=rows // padded,
        D=dim,
        D_PADDED=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=block_size,
        N=64 if q.dtype != torch.float32 else 32,
        SPAN=scratch.span,
        MOST_SPANS=scratch.spans,
        SINGLES=singles,
        SOFTCAP=softcap or 0.0,
        CHUNKED=chunk is not None,
        SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=2 if q.dtype != torch.float32 else 1,
        enable_fp_fusion=False,  # both paths through the kernel must round the same way
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
    tables = torch.arange(len(keys), dtype=torch.int32, device=device).repeat(len(starts), 1)
    scratch = SpanScratch(len(starts), num_heads, kv_heads, head_dim, longest, device)
    places = integers(range(len(starts)))
    found = []
    for singles in (False, True):
        out = torch.empty_like(q)
        invariant_attention(
            q,
            keys,
            values,
            out,
            tables=tables,
            tile_chunk=places,
            tile_offset=scratch.offsets,
            tile_queries=queries_per_tile(num_heads, kv_heads, head_dim, dtype),
            chunk_slot=places,
            chunk_row=places,
            chunk_start=integers(starts),
            chunk_count=integers([1] * len(starts)),
            scratch=scratch,
            singles=singles,
            scale=head_dim**-0.5,
        )
        found.append(out)
    return torch.equal(*found)

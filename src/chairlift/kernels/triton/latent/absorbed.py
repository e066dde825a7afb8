"""The absorbed form of latent attention: queries of latents over the cached rows, each read once as key and as value.

One kernel serves decodes and the cached contexts of prompt chunks:

    decode            one token, its heads as rows of a tile; it sees every cached position, its own included
    chunk's context   some tokens with their heads; they see every position before the chunk

So no position within a context is masked. A decode's context is cut into parts, which a second kernel joins: a part of
16 heads has 8,192 numbers, too many for one program to join those of a long context. The tokens of a chunk see each
other in the expanded form (expanded.py), which also joins both results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import LOG2_E, Chunks, in_type_of, places, precision_for
from chairlift.kernels.triton.launch import (
    cdiv,
    last_power_of_2,
    next_power_of_2,
    overlapping,
    shared_memory,
    tuned,
)

PROGRAMS = 128  # one per multiprocessor of a Hopper GPU, which has 132: one takes most of the shared memory
# Positions: one tile. A context of 1,024 tokens in 16 parts takes 10 us on an H200 and in 4 parts of 256 tokens 22.
MIN_SPLIT = 64
MANY_SPLITS = 16  # A part of a usual context is one tile if there are so many.
FEW_HEADS = 16  # A program has this many, and four warps hold their sums in registers.
COLUMNS = 128  # A program joins this many of a latent.


@triton.jit
def _absorbed_kernel(
    q_ptr,  # [T, HEADS, RANK]: queries of latents
    q_rope_ptr,  # [T, HEADS, ROPE]
    cache_ptr,  # [blocks, block_size, 1, RANK + ROPE]
    out_ptr,  # [T, HEADS, RANK]
    lse_ptr,  # [T, HEADS] float32, in log 2; not with SINGLES
    partial_ptr,  # [rows, SPLITS, HEADS, RANK] float32; this and the next with SPLITS > 1 only
    partial_lse_ptr,  # [rows, SPLITS, HEADS] float32
    tables_ptr,
    tile_chunk_ptr,  # [tiles] int32, -1 for none; not with SINGLES
    tile_offset_ptr,
    chunk_slot_ptr,  # [chunks] int32
    chunk_row_ptr,
    chunk_start_ptr,
    chunk_count_ptr,
    q_stride,
    q_rope_stride,
    q_rope_head_stride,
    block_stride,
    token_stride,
    table_stride,
    scale_log2,
    HEADS: tl.constexpr,
    BH: tl.constexpr,  # heads of a program
    QUERIES: tl.constexpr,  # tokens of a program
    PARTS: tl.constexpr,  # programs for the tokens of a tile
    SINGLES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(1) // PARTS
    split = tl.program_id(2)
    if SINGLES:
        chunk = tile
        offset = 0
        row = tile
    else:
        chunk = tl.load(tile_chunk_ptr + tile)
        offset = tl.load(tile_offset_ptr + tile) + tl.program_id(1) % PARTS * QUERIES
    some = tl.maximum(chunk, 0)
    start = tl.load(chunk_start_ptr + some)
    total_count = tl.load(chunk_count_ptr + some)
    slot = tl.load(chunk_slot_ptr + some).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if chunk < 0:
        return
    if SINGLES:
        length = start + 1
        has_work = total_count == 1
    else:
        length = start
        row = tl.load(chunk_row_ptr + chunk) + offset
        has_work = (start > 0) & (offset < total_count)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), N) * N, SHORTEST)
    num_splits = tl.cdiv(length, span)
    if (has_work & (split < num_splits)) == 0:
        return
    count = tl.minimum(total_count - offset, QUERIES)
    begin = split * span
    end = tl.minimum(begin + span, length)

    M: tl.constexpr = QUERIES * BH
    m = tl.arange(0, M)
    r = tl.arange(0, RANK_PADDED)
    p = tl.arange(0, ROPE_PADDED)
    n = tl.arange(0, N)
    head = tl.program_id(0) * BH + m % BH
    token = (row + m // BH).to(tl.int64)
    exists = (m // BH < count) & (head < HEADS)
    in_rank = (r < RANK)[None, :]
    in_rope = (p < ROPE)[None, :]
    q_at = q_ptr + token[:, None] * q_stride + head[:, None] * RANK
    q = tl.load(q_at + r[None, :], mask=exists[:, None] & in_rank, other=0.0)
    rope_at = q_rope_ptr + token[:, None] * q_rope_stride + head[:, None] * q_rope_head_stride
    q_rope = tl.load(rope_at + p[None, :], mask=exists[:, None] & in_rope, other=0.0)
    table = tables_ptr + slot * table_stride
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    # Transposed: the cached rows are the left side of both products, which the tensor cores of Hopper read from shared
    # memory in tiles of 64 rows, while the heads may be few.
    acc = tl.zeros([RANK_PADDED, M], tl.float32)
    for at in range(begin, end, N):
        inside = at + n < end
        place = cache_ptr + places(table, at + n, inside, block_stride, token_stride, BLOCK_SIZE)[:, None]
        latent = in_type_of(tl.load(place + r[None, :], mask=inside[:, None] & in_rank, other=0.0), q)
        rope = in_type_of(tl.load(place + RANK + p[None, :], mask=inside[:, None] & in_rope, other=0.0), q)
        scores = tl.dot(latent, tl.trans(q), input_precision=PRECISION)
        scores = tl.dot(rope, tl.trans(q_rope), scores, input_precision=PRECISION) * scale_log2
        scores = tl.where(inside[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 0))
        weights = tl.exp2(scores - new_best[None, :])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(latent), weights.to(q.dtype), acc * shrink[None, :], input_precision=PRECISION)
        best = new_best
    result = tl.trans(acc / total[None, :])
    keep = exists[:, None] & in_rank
    if SPLITS > 1 and num_splits > 1:
        part = (tile * SPLITS + split) * HEADS + head
        tl.store(partial_ptr + part[:, None].to(tl.int64) * RANK + r[None, :], result, mask=keep)
        tl.store(partial_lse_ptr + part, best + tl.log2(total), mask=exists)
        return
    out_at = out_ptr + (token[:, None] * HEADS + head[:, None]) * RANK
    tl.store(out_at + r[None, :], result.to(out_ptr.dtype.element_ty), mask=keep)
    if not SINGLES:
        tl.store(lse_ptr + token * HEADS + head, best + tl.log2(total), mask=exists)


@triton.jit
def _join_kernel(
    out_ptr,  # [rows, HEADS, RANK]
    partial_ptr,
    partial_lse_ptr,
    row_start_ptr,
    row_count_ptr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the parts of one row's context, for one head and some columns."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(row_start_ptr + row) + 1
    count = tl.load(row_count_ptr + row)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_splits = tl.cdiv(length, tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), N) * N, SHORTEST))
    if ((count == 1) & (num_splits > 1)) == 0:
        return
    s = tl.arange(0, SPLITS)
    part = (row * SPLITS + s) * HEADS + head
    lse = tl.load(partial_lse_ptr + part, mask=s < num_splits, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse))
    weights /= tl.sum(weights)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    mask = (s < num_splits)[:, None] & (d < RANK)[None, :]
    parts = tl.load(partial_ptr + part[:, None].to(tl.int64) * RANK + d[None, :], mask=mask, other=0.0)
    joined = tl.sum(parts * weights[:, None], 0)
    at = out_ptr + (row.to(tl.int64) * HEADS + head) * RANK + d
    tl.store(at, joined.to(out_ptr.dtype.element_ty), mask=d < RANK)


class LatentScratch:
    """Parts of the contexts of single tokens; all layers of one shape share it."""

    def __init__(self, num_heads: int, rank: int, device: torch.device) -> None:
        parts = PROGRAMS // cdiv(num_heads, _heads_per_program(num_heads))
        self.partial = torch.empty(parts, num_heads, rank, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts, num_heads, dtype=torch.float32, device=device)


class LatentTiling(NamedTuple):
    heads: int  # heads of a program
    queries: int  # tokens of a program
    keys: int  # cached positions of a tile
    warps: int
    stages: int


def latent_splits(rows: int, num_heads: int) -> int:
    """The most parts of a context: as many as the GPU has room for."""
    if not tuned():
        return 1
    programs = rows * cdiv(num_heads, _heads_per_program(num_heads))
    return last_power_of_2(max(1, PROGRAMS // programs))


def attend_singles(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    out: Tensor,
    *,
    rows: int,
    chunks: Chunks,
    scale: float,
    scratch: LatentScratch,
    splits: int | None = None,
) -> None:
    """Attention of the first `rows` rows, all single tokens whose latents are in the cache.

    q, out [T, heads, rank]; q_rope [T, heads, rope]; cache [blocks, block_size, 1, rank + rope].
    """
    _, num_heads, rank = q.shape
    splits = splits or latent_splits(rows, num_heads)
    assert splits == 1 or rows * splits <= len(scratch.partial)
    tiling = _tiling(num_heads, 1, q, cache, splits=splits)
    grid = (cdiv(num_heads, tiling.heads), rows, splits)
    _launch(grid, q, q_rope, cache, out, scratch.lse, chunks, scale, tiling, scratch=scratch)
    if splits > 1:
        _join_kernel[(rows, num_heads, cdiv(rank, COLUMNS))](
            out,
            scratch.partial,
            scratch.lse,
            chunks.start,
            chunks.count,
            HEADS=num_heads,
            RANK=rank,
            N=tiling.keys,
            SPLITS=splits,
            SHORTEST=MIN_SPLIT,
            BD=COLUMNS,
            num_warps=4,
            **overlapping(q.device),
        )


def attend_contexts(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    chunks: Chunks,
    scale: float,
) -> None:
    """Attention of the tokens of chunks over what was cached before the chunk, if anything was.

    As `attend_singles`; lse [T, heads] float32 receives the logarithm (base 2) of each row's sum of weights. Rows of
    chunks without a context are not written.
    """
    tiling = _tiling(q.shape[1], chunks.tile_queries, q, cache)
    parts = chunks.tile_queries // tiling.queries
    grid = (cdiv(q.shape[1], tiling.heads), len(chunks.tile_chunk) * parts, 1)
    _launch(grid, q, q_rope, cache, out, lse, chunks, scale, tiling)


def _launch(
    grid: tuple[int, int, int],
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    out: Tensor,
    lse: Tensor,
    chunks: Chunks,
    scale: float,
    tiling: LatentTiling,
    scratch: LatentScratch | None = None,
) -> None:
    """`scratch`: that of single tokens; None: the tiles of chunks."""
    _, num_heads, rank = q.shape
    rope = q_rope.shape[2]
    _absorbed_kernel[grid](
        q,
        q_rope,
        cache,
        out,
        lse,
        lse if scratch is None else scratch.partial,
        lse if scratch is None else scratch.lse,
        *chunks.tensors,
        q.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        cache.stride(0),
        cache.stride(1),
        chunks.tables.stride(0),
        scale * LOG2_E,
        HEADS=num_heads,
        BH=tiling.heads,
        QUERIES=tiling.queries,
        PARTS=1 if scratch is not None else chunks.tile_queries // tiling.queries,
        SINGLES=scratch is not None,
        RANK=rank,
        RANK_PADDED=max(16, next_power_of_2(rank)),
        ROPE=rope,
        ROPE_PADDED=max(16, next_power_of_2(rope)),
        BLOCK_SIZE=cache.shape[1],
        N=tiling.keys,
        SPLITS=grid[2],
        SHORTEST=MIN_SPLIT,
        PRECISION=precision_for(q.dtype),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlapping(q.device),
    )


def _heads_per_program(num_heads: int) -> int:
    """A program's sums take 2 KiB of registers per head; a matrix product has at least 16 rows."""
    return min(64, max(16, next_power_of_2(num_heads)))


def _tiling(num_heads: int, tile_queries: int, q: Tensor, cache: Tensor, *, splits: int = 1) -> LatentTiling:
    """Tiles of which two fit into the shared memory beside the queries.

    The best of six tilings on an H200 with 16 heads and one request: four warps with contexts of 8,192 and 65,536
    tokens (eight: 1.05 and 1.1 times as long; tiles of 32 positions: 1.4 times); eight warps and two stages with 256
    and 1,024 tokens, where a part is one tile.
    """
    heads = _heads_per_program(num_heads)
    queries = min(tile_queries, 64 // heads)
    if q.dtype == torch.float32:
        return LatentTiling(heads, queries, 16, 4, 1)
    rows, numbers = heads * queries, cache.shape[3]
    few = rows <= FEW_HEADS and cache.dtype == q.dtype
    stored = 2 * cache.itemsize + (q.itemsize if cache.dtype != q.dtype else 0)  # bytes per number of a tile
    left = shared_memory(q.device) - rows * numbers * q.itemsize - 1024
    fits = (keys for keys in (64, 32) if keys * (numbers * stored + rows * q.itemsize) <= left)
    keys = next(fits, 0)
    if few and keys and splits >= MANY_SPLITS:
        return LatentTiling(heads, queries, keys, 8, 2)
    return LatentTiling(heads, queries, keys or 16, 4 if few else 8, 3 if keys else 1)

"""Paged attention of prompt chunks on a GPU, and what all attention kernels share. Single tokens: decode.py.

Keys and values are read in place through the block tables, with a running softmax, so no score matrix is written.
Queries that share a key head (GQA) are packed into one tile, so each key and value is loaded once for all of them. One
program per (tile of queries, key head) walks the context from its start to the diagonal.

Everything that changes from step to step is read from device memory, so a captured graph can be replayed for any
batch that fits its grid: programs without work return at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import next_power_of_2, overlapping, shared_memory, tuned

LOG2_E = 1.4426950408889634


@triton.jit
def in_type_of(cached, q):
    """Convert keys or values to the type of the queries. Before Hopper, fp8 converts to bfloat16 only via float16."""
    if cached.dtype == tl.float8e4nv:
        cached = cached.to(tl.float32)
    return cached.to(q.dtype)


@triton.jit
def scores_of(q, k, scale_log2, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of q [M, D] and k [D, N], scaled for exp2."""
    return cap_scores(tl.dot(q, k, input_precision=PRECISION) * scale_log2, SOFTCAP)


@triton.jit
def cap_scores(scores, SOFTCAP: tl.constexpr):
    """Soft-cap scores that are already divided by the cap: tanh(x) = 1 - 2 / (exp(2x) + 1)."""
    if SOFTCAP > 0:
        scores = (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0)) * (SOFTCAP * 1.4426950408889634)
    return scores


@triton.jit
def first_visible(position, window, CHUNKED: tl.constexpr):
    """The first position that a token sees, which may be below 0; CHUNKED: `window` is the size of a chunk."""
    if CHUNKED:
        return position // window * window
    return position - window + 1


@triton.jit
def sinks_of(sinks_ptr, heads, keep, SINKS: tl.constexpr):
    """Begin the running softmax of some heads: with their sinks, for exp2, if there are any, else with nothing."""
    best = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + heads, mask=keep, other=0.0) * 1.4426950408889634
        total += 1.0
    return best, total


@triton.jit
def places(table, position, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE: tl.constexpr):
    """Offsets of these positions' keys and values in the cache."""
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * kv_block_stride + (position % BLOCK_SIZE) * kv_token_stride


@triton.jit
def load_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head, PAIRED: tl.constexpr):
    """Load a tile of keys and values; PAIRED: as words of two 8-bit numbers."""
    mask = inside[:, None] & in_head[None, :]
    if PAIRED:
        k_at = (keys_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + head_offset[None, :]
        v_at = (values_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + head_offset[None, :]
        k = tl.load(k_at, mask=mask, other=0)
        v = tl.load(v_at, mask=mask, other=0)
    else:
        k = tl.load(keys_ptr + offset[:, None] + head_offset[None, :], mask=mask, other=0.0)
        v = tl.load(values_ptr + offset[:, None] + head_offset[None, :], mask=mask, other=0.0)
    return k, v


@triton.jit
def _unscaled(q, k, scale_log2, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores and the factor that is still to be applied: scaling and subtracting the maximum are then one operation."""
    scores = tl.dot(q, tl.trans(in_type_of(k, q)), input_precision=PRECISION)
    left = scale_log2
    if SOFTCAP > 0:
        scores = cap_scores(scores * scale_log2, SOFTCAP)
        left = 1.0
    return scores, left


@triton.jit
def _weighed(scores, left, new_best, v, q, best, total, acc, PRECISION: tl.constexpr):
    """Update the running softmax with a tile of scores [ROWS, N] and values [N, D]."""
    weights = tl.exp2(scores * left - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), in_type_of(v, q), acc * shrink[:, None], input_precision=PRECISION)
    return total, acc


@triton.jit
def _prefill_kernel(
    q_ptr,  # [T, heads, D]
    keys_ptr,
    values_ptr,
    out_ptr,  # [T, heads, D]
    sinks_ptr,  # [heads] float32, with SINKS only
    tables_ptr,
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
    SOFTCAP: tl.constexpr,
    CHUNKED: tl.constexpr,  # attention stays within chunks of `window` positions
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Later tiles of a prompt have longer contexts: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    chunk = tl.load(tile_chunk_ptr + tile)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if chunk < 0:
        return
    offset = tl.load(tile_offset_ptr + tile)
    slot = tl.load(chunk_slot_ptr + chunk).to(tl.int64)
    row = tl.load(chunk_row_ptr + chunk) + offset
    start = tl.load(chunk_start_ptr + chunk) + offset
    count = tl.minimum(tl.load(chunk_count_ptr + chunk) - offset, QUERIES)

    ROWS: tl.constexpr = QUERIES * GROUP_PADDED  # all query heads of token 0, of token 1, ...
    m = tl.arange(0, ROWS)
    d = tl.arange(0, D_PADDED)
    n = tl.arange(0, N)
    token = m // GROUP_PADDED
    in_head = d < D
    keep = ((token < count) & (m % GROUP_PADDED < GROUP))[:, None] & in_head[None, :]
    q_place = (row + token).to(tl.int64)
    q_head = head * GROUP + m % GROUP_PADDED
    q = tl.load(q_ptr + q_place[:, None] * q_stride + q_head[:, None] * D + d[None, :], mask=keep, other=0.0)
    table = tables_ptr + slot * table_stride
    seen_by = start + token  # last visible position of each row
    best, total = sinks_of(sinks_ptr, q_head, m % GROUP_PADDED < GROUP, SINKS)
    acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    head_offset = head * D + d
    in_row = in_head[None, :]
    end = start + count
    first = tl.maximum(first_visible(start, window, CHUNKED), 0)
    begin = first // N * N
    # Tiles visible to every row need no mask; those on the diagonal do, and any tile may with a window or a chunk.
    masked = begin + window < end
    if CHUNKED:
        masked = masked | (begin < first)
    whole = tl.where(masked, begin, tl.maximum((start + 1) // N * N, begin))
    place = places(table, begin + n, begin + n < whole, kv_block_stride, kv_token_stride, BLOCK_SIZE)
    for at in range(begin, whole, N):
        tile_at = place[:, None] + head_offset[None, :]
        # Load the block table of the next tile while this one is computed.
        place = places(table, at + N + n, at + N + n < whole, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        k = tl.load(keys_ptr + tile_at) if D == D_PADDED else tl.load(keys_ptr + tile_at, mask=in_row, other=0.0)
        scores, left = _unscaled(q, k, scale_log2, SOFTCAP, PRECISION)
        new_best = tl.maximum(best, tl.max(scores, 1) * left)
        v = tl.load(values_ptr + tile_at) if D == D_PADDED else tl.load(values_ptr + tile_at, mask=in_row, other=0.0)
        total, acc = _weighed(scores, left, new_best, v, q, best, total, acc, PRECISION)
        best = new_best
    for at in range(whole, end, N):
        position = at + n
        inside = position < end
        place = places(table, position, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        mask = inside[:, None] & in_row
        k = tl.load(keys_ptr + place[:, None] + head_offset[None, :], mask=mask, other=0.0)
        scores, left = _unscaled(q, k, scale_log2, SOFTCAP, PRECISION)
        lowest = first_visible(seen_by, window, CHUNKED)
        visible = (position[None, :] <= seen_by[:, None]) & (position[None, :] >= lowest[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * left)
        # A row without a visible key so far (its window begins later) has no maximum: avoid NaN.
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        v = tl.load(values_ptr + place[:, None] + head_offset[None, :], mask=mask, other=0.0)
        total, acc = _weighed(scores, left, safe, v, q, best, total, acc, PRECISION)
        best = new_best
    total = tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + q_place[:, None] * out_stride + q_head[:, None] * D + d[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


def queries_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens per query tile of the prefill kernel; all query heads of a key head share the tile."""
    rows = 128 if dtype != torch.float32 and head_dim <= 128 else 32
    group = next_power_of_2(num_heads // num_kv_heads)
    return max(16 // group, rows // group, 1)  # a matrix product has at least 16 rows


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a batch and their tiles of queries, as in `PagedLayout`; in the order of the kernels' arguments."""

    tables: Tensor  # the block tables, int32 as all that follow
    tile_chunk: Tensor
    tile_offset: Tensor
    slot: Tensor
    row: Tensor
    start: Tensor
    count: Tensor
    tile_queries: int

    @classmethod
    def of(cls, layout: Any) -> Chunks:
        tiles = (layout.tables, layout.tile_chunk, layout.tile_offset)
        chunks = (layout.chunk_slot, layout.chunk_row, layout.chunk_start, layout.chunk_count)
        return cls(*tiles, *chunks, layout.tile_queries)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        tiles = (self.tables, self.tile_chunk, self.tile_offset)
        return (*tiles, self.slot, self.row, self.start, self.count)


class Scoring(NamedTuple):
    """How a layer computes its scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None  # attention stays within chunks of so many positions
    sinks: Tensor | None = None  # [heads] float32

    @property
    def numbers(self) -> tuple[float, int]:
        """The scale, for weights that are powers of two, and the window or chunk."""
        scale = self.scale * LOG2_E if self.softcap is None else self.scale / self.softcap
        return scale, self.chunk or self.window or 2**30

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """What kernels are compiled for; `dtype` is that of queries."""
        return {
            "SOFTCAP": self.softcap or 0.0,
            "CHUNKED": self.chunk is not None,
            "SINKS": self.sinks is not None,
            "PRECISION": precision_for(dtype),
        }


def strides(q: Tensor, out: Tensor, keys: Tensor, tables: Tensor) -> tuple[int, ...]:
    """The strides of queries, results, blocks and tokens of the cache, and block tables."""
    return q.stride(0), out.stride(0), keys.stride(0), keys.stride(1), tables.stride(0)


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, chunks: Chunks, scoring: Scoring, *, deep: bool = False
) -> None:
    """Attention of prompt chunks, split into tiles. `deep`: some contexts are long."""
    _, num_heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    rows = chunks.tile_queries * next_power_of_2(group)
    tile = _key_tile(rows, next_power_of_2(dim), q.dtype, shared_memory(q.device), deep)
    _prefill_kernel[(kv_heads, len(chunks.tile_chunk))](
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
        N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **scoring.constants(q.dtype),
        **overlapping(q.device),
    )


class KeyTile(NamedTuple):
    """Keys per tile, warps per program and pipeline stages."""

    keys: int
    warps: int
    stages: int


DEEP_TILE = KeyTile(128, 8, 3)
WIDE_HEAD = 256  # dimensions: tiles of wider heads have fewer numbers per thread, and fit 99 KB of shared memory


def _key_tile(rows: int, padded_dim: int, dtype: torch.dtype, shared: int, deep: bool) -> KeyTile:
    """The fastest key tile on an H200 for a query tile of `rows`. Large tiles (one program per multiprocessor) save 7
    to 9% at contexts of 64k tokens and lose where most work is on the diagonal."""
    if dtype == torch.float32:
        return KeyTile(32, 4, 1) if padded_dim <= WIDE_HEAD else KeyTile(16, 8, 1)
    if padded_dim > WIDE_HEAD:
        return KeyTile(32, 8, 2)
    kept = dtype.itemsize * padded_dim * (rows + 2 * DEEP_TILE.stages * DEEP_TILE.keys)  # queries, keys and values
    return DEEP_TILE if deep and tuned() and padded_dim == 128 and kept <= shared else KeyTile(32, 4, 3)


def precision_for(dtype: torch.dtype) -> str:
    """Precision of tl.dot: exact for float32; irrelevant for other types."""
    return "ieee" if dtype == torch.float32 else "tf32"

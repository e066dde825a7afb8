"""Paged attention of single new tokens on a GPU: number of context splits and tile sizes for `decode_kernel.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chairlift.kernels.triton.attention import WIDE_HEAD, Scoring, strides
from chairlift.kernels.triton.decode_kernel import decode_kernel
from chairlift.kernels.triton.launch import last_power_of_2, next_power_of_2, overlapping, tuned

PROGRAMS = 512  # about four per multiprocessor of a Hopper GPU, which has 132
# Up to so many programs, contexts of heads of more than 128 numbers are split into parts of 64 keys: a step of Gemma 4
# E2B (20 layers, 512 tokens of context) takes 1,498 instead of 1,700 µs with 1 request, 1,780 instead of 1,941 with 32.
FEW_WIDE_PROGRAMS = 64


def decode_splits(rows: int, num_kv_heads: int, *, long: bool = False) -> int:
    """Maximum splits of a context. Small batches do not fill the GPU without splits; with slightly more programs than
    it holds, the longest contexts would run alone at the end. In between, empty programs cost more than splits save,
    unless some context is `long`."""
    if not tuned():
        return 1
    programs = rows * num_kv_heads
    if long and programs > PROGRAMS // 4:
        return last_power_of_2(min(8, 4 * PROGRAMS // programs))
    if programs > PROGRAMS:
        return 2 if programs <= 2 * PROGRAMS else 1
    return last_power_of_2(min(64, PROGRAMS // 2 // programs))


class Scratch:
    """Partial results of the splits of the decode kernel.

    Steps of one stream run in sequence, so all layers of a shape and all batch sizes share it.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        parts = max(1, 4 * PROGRAMS // num_kv_heads)
        self.partial = torch.empty(parts, num_heads, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts, num_heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device=device)


class Fresh(NamedTuple):
    """Norm weights [D] and rotation [rows, ..., pairs] that turn a projection into queries, keys and values."""

    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos: Tensor | None
    sin: Tensor | None
    v_norm: bool = False  # values are normalised, too, without a weight


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    tables: Tensor,
    row_slot: Tensor,
    row_start: Tensor,
    row_count: Tensor,
    scratch: Scratch,
    scoring: Scoring,
    long: bool = False,
    splits: int | None = None,
    fresh: Fresh | None = None,
    tiling: DecodeTiling | None = None,
) -> None:
    """Attention of rows 0 .. len(row_slot) - 1 of `q` [T, heads, D], all single tokens; writes the same rows of `out`.

    With `fresh`, `q` is the projection [T, heads + 2 * kv_heads, D]; the new keys and values are written to the cache.
    With heads + kv_heads, values are the keys before their norm and rotation; with queries only, the cache has both.
    """
    rows, (_, num_heads, dim) = len(row_slot), out.shape
    _, block_size, kv_heads, _ = keys.shape
    splits = splits or decode_splits(rows, kv_heads, long=long)
    assert splits == 1 or (rows * splits <= len(scratch.partial) and rows * kv_heads <= len(scratch.arrived))
    group = num_heads // kv_heads
    tiling = tiling or _decode_tiling(rows, kv_heads, group, dim, q.dtype, keys.dtype)
    pairs = 0 if fresh is None or fresh.cos is None else fresh.cos.shape[-1]
    q_norm, k_norm, eps, cos, sin, v_norm = fresh or Fresh(None, None, 0.0, None, None)
    # Heads of one row are neighbours in the grid, since their keys are neighbours in memory.
    decode_kernel[(kv_heads, rows, splits)](
        q,
        keys,
        values,
        out,
        scratch.partial,
        scratch.lse,
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
        M=max(8 if tiling.turned else 16, next_power_of_2(group)),
        D=dim,
        # Of words of two 8-bit numbers, even and odd halves are multiplied by themselves: at least 16 each.
        D_PADDED=max(32 if keys.dtype.itemsize == 1 else 16, next_power_of_2(dim)),
        BLOCK_SIZE=block_size,
        N=tiling.keys,
        SPLITS=splits,
        MIN_SPLIT=tiling.min_split,
        FRESH=fresh is not None,
        NEW=0 if fresh is None else (q.shape[1] - num_heads) // kv_heads,
        V_NORM=v_norm,
        PAIRS=pairs,
        HAS_NORM=q_norm is not None,
        KV_LIMIT=torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else 0.0,
        EARLY=tiling.early
        and fresh is not None
        and dim * keys.element_size() % 16 == 0,  # prefetches need 16-byte alignment
        AHEAD=tiling.ahead,
        TURNED=tiling.turned,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **scoring.constants(q.dtype),
        **overlapping(q.device),
    )


class DecodeTiling(NamedTuple):
    keys: int  # keys per tile
    min_split: int  # shortest split
    warps: int
    stages: int
    early: bool = False  # read the first tile before the previous kernel has ended
    ahead: bool = False  # read the block table one tile ahead
    turned: bool = False  # multiply an 8-bit cache from the left, in float16


def _decode_tiling(
    rows: int, num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> DecodeTiling:
    """The fastest tiling on an H200, measured within whole steps under load."""
    programs = rows * num_kv_heads
    if head_dim > WIDE_HEAD and dtype == torch.float32:
        return DecodeTiling(16, 64, 8, 1)
    if head_dim > WIDE_HEAD:
        return DecodeTiling(32, 64, 4, 3) if programs <= FEW_WIDE_PROGRAMS else DecodeTiling(32, 256, 8, 3)
    if dtype == torch.float32:
        return DecodeTiling(32, 64, 4, 3)
    if not tuned():
        return DecodeTiling(32, 512, 4, 3)
    if head_dim > 128 and programs <= 768:
        split = 64 if programs <= FEW_WIDE_PROGRAMS else 256
        return DecodeTiling(32, split, 4, 3)  # larger tiles exceed the shared memory of smaller GPUs
    if cache_dtype.itemsize == 1 and programs > 64 and group <= 8 and head_dim <= 128:
        return _turned_tiling(programs)
    if cache_dtype.itemsize == 1 and programs > 256:  # conversions take registers, and words half the shared memory
        in_pairs = programs <= 512 or 1024 < programs <= 1536
        return DecodeTiling(64, 512, 2, 3, ahead=True) if in_pairs else DecodeTiling(32, 512, 1, 4)
    if programs <= 512:
        return DecodeTiling(64, 64 if programs <= 16 else 512, 4, 3, early=True, ahead=True)
    if programs <= 1536:
        return DecodeTiling(32, 512, 1, 3, ahead=not 768 < programs <= 1024)
    return DecodeTiling(32, 512, 1, 4)


def _turned_tiling(programs: int) -> DecodeTiling:
    """The fastest tiling for an 8-bit cache: the more programs, the more of them share a multiprocessor."""
    if programs <= 384:
        return DecodeTiling(128, 512, 4, 3, ahead=True, turned=True)
    if programs <= 512:
        return DecodeTiling(64, 512, 2, 3, ahead=True, turned=True)
    return DecodeTiling(32, 512, 1, 3, ahead=True, turned=True)

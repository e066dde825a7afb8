"""Normalises and rotates new latents, stores them in the paged cache, and rotates the queries, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping

HEADS_PER_PROGRAM = 16


@triton.jit
def _rotated_pair(at, cos_ptr, sin_ptr, row, i, mask, PAIRS: tl.constexpr):
    """Load both halves of rotated dimensions, rotated, in float32; at [n, 1] pointers to the first."""
    first = tl.load(at + i[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + PAIRS + i[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * PAIRS + i, mask=i < PAIRS, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * PAIRS + i, mask=i < PAIRS, other=0.0).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _as_stored(x, KV_LIMIT: tl.constexpr):
    """Clamp to the range of the cache's type; NaN stays."""
    if KV_LIMIT > 0:
        x = tl.clamp(x, -KV_LIMIT, KV_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _prepare_kernel(
    q_ptr,  # [T, HEADS, NOPE + ROPE]: rotated in place
    latent_ptr,  # [T, RANK + ROPE]: normalised and rotated in place
    cache_ptr,  # [blocks, block_size, 1, RANK + ROPE]
    norm_ptr,  # [RANK]
    cos_ptr,  # [T, ROPE // 2]
    sin_ptr,
    slots_ptr,  # [T] int32
    positions_ptr,  # [T] int32, -1 for padding rows
    tables_ptr,
    eps,
    q_stride,
    latent_stride,
    block_stride,
    token_stride,
    table_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    H_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_LIMIT: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, 0) does the latent, the others tiles of query heads."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if position < 0:
        return
    PAIRS: tl.constexpr = ROPE // 2
    i = tl.arange(0, PAIRS_PADDED)
    kind = latent_ptr.dtype.element_ty
    if tl.program_id(1) == 0:
        block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
        to = cache_ptr + block * block_stride + (position % BLOCK_SIZE) * token_stride
        stored = cache_ptr.dtype.element_ty
        at = latent_ptr + row * latent_stride
        r = tl.arange(0, RANK_PADDED)
        x = tl.load(at + r, mask=r < RANK, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        x = (x * tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)).to(kind)
        tl.store(at + r, x, mask=r < RANK)
        tl.store(to + r, _as_stored(x.to(tl.float32), KV_LIMIT).to(stored), mask=r < RANK)
        one = tl.arange(0, 1)[:, None]
        mask = (i < PAIRS)[None, :] & (one == 0)
        if HAS_ROPE:
            first, second = _rotated_pair(at + RANK + one, cos_ptr, sin_ptr, row, i, mask, PAIRS)
        else:
            first = tl.load(at + RANK + one + i[None, :], mask=mask, other=0.0).to(tl.float32)
            second = tl.load(at + RANK + PAIRS + one + i[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = first.to(kind), second.to(kind)
        tl.store(at + RANK + one + i[None, :], first, mask=mask)
        tl.store(at + RANK + PAIRS + one + i[None, :], second, mask=mask)
        tl.store(to + RANK + one + i[None, :], _as_stored(first.to(tl.float32), KV_LIMIT).to(stored), mask=mask)
        tl.store(
            to + RANK + PAIRS + one + i[None, :], _as_stored(second.to(tl.float32), KV_LIMIT).to(stored), mask=mask
        )
    else:
        head = (tl.program_id(1) - 1) * H_TILE + tl.arange(0, H_TILE)
        q_at = q_ptr + row * q_stride + (head * (NOPE + ROPE) + NOPE)[:, None]
        in_head = (head < HEADS)[:, None] & (i < PAIRS)[None, :]
        q_first, q_second = _rotated_pair(q_at, cos_ptr, sin_ptr, row, i, in_head, PAIRS)
        tl.store(q_at + i[None, :], q_first.to(kind), mask=in_head)
        tl.store(q_at + PAIRS + i[None, :], q_second.to(kind), mask=in_head)


def prepare_latents_(
    q: Tensor,
    latent: Tensor,
    cache: Tensor,
    *,
    norm: Tensor,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
) -> None:
    """Normalise and rotate latent [T, rank + rope] in place and store it; rotate q [T, heads, nope + rope] in place.

    Padding rows are left as they are.
    """
    _, num_heads, dim = q.shape
    rank = len(norm)
    rope = latent.shape[1] - rank
    heads = cdiv(num_heads, HEADS_PER_PROGRAM) if cos is not None else 0
    _prepare_kernel[(len(q), 1 + heads)](
        q,
        latent,
        cache,
        norm,
        q if cos is None else cos,
        q if sin is None else sin,
        slots,
        positions,
        tables,
        eps,
        q.stride(0),
        latent.stride(0),
        cache.stride(0),
        cache.stride(1),
        tables.stride(0),
        HEADS=num_heads,
        NOPE=dim - rope,
        ROPE=rope,
        RANK=rank,
        RANK_PADDED=next_power_of_2(rank),
        PAIRS_PADDED=next_power_of_2(rope // 2),
        H_TILE=HEADS_PER_PROGRAM,
        BLOCK_SIZE=cache.shape[1],
        KV_LIMIT=torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0,
        HAS_ROPE=cos is not None,
        num_warps=4,
        **overlapping(q.device),
    )

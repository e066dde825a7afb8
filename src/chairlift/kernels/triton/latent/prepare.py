"""Normalises and rotates new latents, stores them in the paged cache, and rotates the queries, in one kernel.

With few rows the same kernel also turns queries of keys into queries of latents (the absorbed form).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import precision_for
from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping

HEADS_PER_PROGRAM = 16
FEW_ROWS = 64  # cuBLAS multiplies the queries faster if there are more.
COLUMNS = 128  # A program multiplies this many of a latent.


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


@triton.jit
def _rotated_rows(at, cos_ptr, sin_ptr, row, i, mask, PAIRS: tl.constexpr):
    """As `_rotated_pair`, for rows [n] with angles of their own."""
    first = tl.load(at + i[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + PAIRS + i[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = row[:, None] * PAIRS + i[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _absorb_tile(
    q_ptr,
    up_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    T,
    q_stride,
    m,
    r,
    HEADS: tl.constexpr,
    UP_ROWS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply the queries m of one head for the columns r of latents; the first columns' program also rotates them."""
    head = tl.program_id(1)
    d = tl.arange(0, NOPE_PADDED)
    up_at = up_ptr + (head * UP_ROWS + d)[:, None] * RANK + r[None, :]
    up = tl.load(up_at, mask=(d < NOPE)[:, None] & (r < RANK)[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = m.to(tl.int64)
    q_at = q_ptr + (row * q_stride + head * (NOPE + ROPE))[:, None]
    q = tl.load(q_at + d[None, :], mask=(m < T)[:, None] & (d < NOPE)[None, :], other=0.0)
    out = tl.dot(q, up, input_precision=PRECISION)
    out_at = out_ptr + (row * HEADS + head)[:, None] * RANK + r[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(m < T)[:, None] & (r < RANK)[None, :])
    if HAS_ROPE:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.program_id(2) == 0:
            PAIRS: tl.constexpr = ROPE // 2
            i = tl.arange(0, PAIRS_PADDED)
            real = tl.load(positions_ptr + m, mask=m < T, other=-1) >= 0
            mask = real[:, None] & (i < PAIRS)[None, :]
            first, second = _rotated_rows(q_at + NOPE, cos_ptr, sin_ptr, row, i, mask, PAIRS)
            tl.store(q_at + NOPE + i[None, :], first.to(q.dtype), mask=mask)
            tl.store(q_at + NOPE + PAIRS + i[None, :], second.to(q.dtype), mask=mask)


@triton.jit
def _prepare_rows(
    latent_ptr,
    cache_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    tables_ptr,
    T,
    eps,
    latent_stride,
    block_stride,
    token_stride,
    table_stride,
    m,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_LIMIT: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise and rotate the latents m in place and store them."""
    r = tl.arange(0, RANK_PADDED)
    norm = tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + m, mask=m < T, other=-1)
    slot = tl.load(slots_ptr + m, mask=m < T, other=0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind = latent_ptr.dtype.element_ty
    stored = cache_ptr.dtype.element_ty
    real = position >= 0
    row = m.to(tl.int64)
    block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    to = (cache_ptr + block * block_stride + (position % BLOCK_SIZE) * token_stride)[:, None]
    at = (latent_ptr + row * latent_stride)[:, None]
    mask = real[:, None] & (r < RANK)[None, :]
    x = tl.load(at + r[None, :], mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / RANK + eps)[:, None]
    x = (x * norm[None, :]).to(kind)
    tl.store(at + r[None, :], x, mask=mask)
    tl.store(to + r[None, :], _as_stored(x.to(tl.float32), KV_LIMIT).to(stored), mask=mask)
    PAIRS: tl.constexpr = ROPE // 2
    i = tl.arange(0, PAIRS_PADDED)
    in_rope = real[:, None] & (i < PAIRS)[None, :]
    if HAS_ROPE:
        first, second = _rotated_rows(at + RANK, cos_ptr, sin_ptr, row, i, in_rope, PAIRS)
    else:
        first = tl.load(at + RANK + i[None, :], mask=in_rope, other=0.0).to(tl.float32)
        second = tl.load(at + RANK + PAIRS + i[None, :], mask=in_rope, other=0.0).to(tl.float32)
    first, second = first.to(kind), second.to(kind)
    tl.store(at + RANK + i[None, :], first, mask=in_rope)
    tl.store(at + RANK + PAIRS + i[None, :], second, mask=in_rope)
    tl.store(to + RANK + i[None, :], _as_stored(first.to(tl.float32), KV_LIMIT).to(stored), mask=in_rope)
    tl.store(to + RANK + PAIRS + i[None, :], _as_stored(second.to(tl.float32), KV_LIMIT).to(stored), mask=in_rope)


@triton.jit(do_not_specialize=["T"])
def _absorb_kernel(
    q_ptr,  # [T, HEADS, NOPE + ROPE]: rotated in place
    latent_ptr,  # [T, RANK + ROPE]: normalised and rotated in place
    up_ptr,  # [HEADS, UP_ROWS, RANK]: the first NOPE rows of each head are those of keys
    out_ptr,  # [T, HEADS, RANK]
    cache_ptr,  # [blocks, block_size, 1, RANK + ROPE]
    norm_ptr,  # [RANK]
    cos_ptr,  # [T, ROPE // 2]
    sin_ptr,
    slots_ptr,  # [T] int32
    positions_ptr,  # [T] int32, -1 for padding rows
    tables_ptr,
    T,
    eps,
    q_stride,
    latent_stride,
    block_stride,
    token_stride,
    table_stride,
    HEADS: tl.constexpr,
    UP_ROWS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_LIMIT: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LATENTS: tl.constexpr,  # rows of latents of a program
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (rows, head, columns) multiplies a tile of queries; those behind the last head do the latents."""
    first = tl.program_id(0) * BM
    if tl.program_id(1) < HEADS:
        r = tl.program_id(2) * BN + tl.arange(0, BN)
        _absorb_tile(
            q_ptr, up_ptr, out_ptr, cos_ptr, sin_ptr, positions_ptr, T, q_stride, first + tl.arange(0, BM), r,
            HEADS, UP_ROWS, NOPE, NOPE_PADDED, ROPE, RANK, PAIRS_PADDED, HAS_ROPE, PRECISION, OVERLAP,
        )  # fmt: skip
    else:
        m = first + tl.program_id(2) * LATENTS + tl.arange(0, LATENTS)
        _prepare_rows(
            latent_ptr, cache_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, tables_ptr,
            tl.minimum(T, first + BM), eps, latent_stride, block_stride, token_stride, table_stride, m,
            ROPE, RANK, RANK_PADDED, PAIRS_PADDED, BLOCK_SIZE, KV_LIMIT, HAS_ROPE, OVERLAP,
        )  # fmt: skip


class NewLatents(NamedTuple):
    """The norm and rotation of new latents, and their places in the cache."""

    norm: Tensor  # [rank]
    eps: float
    cos: Tensor | None  # [T, rope // 2]
    sin: Tensor | None
    slots: Tensor  # [T] int32
    positions: Tensor  # [T] int32, -1 for padding rows
    tables: Tensor

    def tensors(self, q: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        """In the order of the kernels' arguments, from the cache on."""
        cos, sin = (q if side is None else side for side in (self.cos, self.sin))
        return cache, self.norm, cos, sin, self.slots, self.positions, self.tables

    def strides(self, q: Tensor, latent: Tensor, cache: Tensor) -> tuple[int, ...]:
        return q.stride(0), latent.stride(0), cache.stride(0), cache.stride(1), self.tables.stride(0)

    def constants(self, q: Tensor, latent: Tensor, cache: Tensor) -> dict[str, Any]:
        """The sizes and the cache's form that both kernels are compiled for."""
        _, num_heads, dim = q.shape
        rank = len(self.norm)
        rope = latent.shape[1] - rank
        return {
            "HEADS": num_heads,
            "NOPE": dim - rope,
            "ROPE": rope,
            "RANK": rank,
            "RANK_PADDED": next_power_of_2(rank),
            "PAIRS_PADDED": next_power_of_2(rope // 2),
            "BLOCK_SIZE": cache.shape[1],
            "KV_LIMIT": torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0,
            "HAS_ROPE": self.cos is not None,
        }


def prepare_and_absorb_(q: Tensor, latent: Tensor, up: Tensor, cache: Tensor, new: NewLatents) -> Tensor:
    """As `prepare_latents_`; returns the queries of latents [T, heads, rank], by up [heads, nope + value, rank]."""
    (rows, num_heads, _), rank = q.shape, len(new.norm)
    constants = new.constants(q, latent, cache)
    out = empty_rows(rows, num_heads, rank, dtype=q.dtype, device=q.device)
    height = min(64, max(16, next_power_of_2(rows)))
    columns = max(16, min(COLUMNS, next_power_of_2(rank)))
    parts = cdiv(rank, columns)
    _absorb_kernel[(cdiv(rows, height), num_heads + 1, parts)](
        q,
        latent,
        up,
        out,
        *new.tensors(q, cache),
        rows,
        new.eps,
        *new.strides(q, latent, cache),
        UP_ROWS=up.shape[1],
        NOPE_PADDED=max(16, next_power_of_2(constants["NOPE"])),
        BM=height,
        BN=columns,
        LATENTS=next_power_of_2(cdiv(height, parts)),
        PRECISION=precision_for(q.dtype),
        num_warps=4,
        **constants,
        **overlapping(q.device),
    )
    return out


def prepare_latents_(q: Tensor, latent: Tensor, cache: Tensor, new: NewLatents) -> None:
    """Normalise and rotate latent [T, rank + rope] in place and store it; rotate q [T, heads, nope + rope] in place.

    Padding rows are left as they are.
    """
    heads = cdiv(q.shape[1], HEADS_PER_PROGRAM) if new.cos is not None else 0
    _prepare_kernel[(len(q), 1 + heads)](
        q,
        latent,
        *new.tensors(q, cache),
        new.eps,
        *new.strides(q, latent, cache),
        H_TILE=HEADS_PER_PROGRAM,
        num_warps=4,
        **new.constants(q, latent, cache),
        **overlapping(q.device),
    )

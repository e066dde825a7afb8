"""The small operations between matrix products, each fused into one pass over its data."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.decode import Fresh
from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping, pairwise_sum, row_options


@triton.jit
def _rotation_kernel(
    positions_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    inv_freq = tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    angle = tl.load(positions_ptr + row).to(tl.float32) * inv_freq
    at = row.to(tl.int64) * PAIRS + pair
    tl.store(cos_ptr + at, (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + at, (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty), mask=inside)


def rotation(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, both [T, 1, pairs] in `dtype`."""
    pairs = len(inv_freq)
    cos = torch.empty(len(positions), 1, pairs, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    _rotation_kernel[(len(positions),)](
        positions,
        inv_freq,
        cos,
        sin,
        scale,
        PAIRS=pairs,
        BLOCK=next_power_of_2(pairs),
        num_warps=1,
        **overlapping(positions.device),
    )
    return cos, sin


@triton.jit(do_not_specialize=["num_tokens", "num_updates"])  # change at every step
def begin_step_kernel(
    tokens_ptr,  # [T] int32: a token, or -1 for the last token sampled in the row's slot
    slots_ptr,  # [T] int32
    last_token_ptr,  # [slots] int32
    resolved_ptr,  # [T] int32: the result
    cells_ptr,  # [updates] int32
    blocks_ptr,  # [updates] int32
    tables_ptr,  # int32, indexed by cells
    num_tokens,
    num_updates,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    token = tl.load(tokens_ptr + at, mask=inside, other=0)
    last = tl.load(last_token_ptr + tl.load(slots_ptr + at, mask=inside, other=0), mask=inside, other=0)
    # After bad logits there is no last token; the request has ended, and the row's result is not used.
    tl.store(resolved_ptr + at, tl.where(token < 0, tl.maximum(last, 0), token), mask=inside)
    changed = at < num_updates
    cell = tl.load(cells_ptr + at, mask=changed, other=0)
    tl.store(tables_ptr + cell, tl.load(blocks_ptr + at, mask=changed, other=0), mask=changed)


def begin_step(
    tokens: Tensor, slots: Tensor, last_token: Tensor, cells: Tensor, blocks: Tensor, tables: Tensor
) -> Tensor:
    """Update the block tables and return the step's tokens, including those only known on the device."""
    resolved = torch.empty_like(tokens)
    count = max(len(tokens), len(cells))
    begin_step_kernel[(cdiv(count, 128),)](
        tokens, slots, last_token, resolved, cells, blocks, tables, len(tokens), len(cells), BLOCK=128, num_warps=4
    )
    return resolved


@triton.jit
def _embed_kernel(
    tokens_ptr,  # [T] int32
    table_ptr,  # [vocab, size]
    out_ptr,  # [T, size]
    squares_ptr,  # [T] float32
    scale,
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * size + column, mask=inside, other=0.0).to(tl.float32) * scale
    rounded = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, rounded, mask=inside)
    x = rounded.to(tl.float32)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


def embed(tokens: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Look up rows [T, size] of the embedding; returns them and their sums of squares [T, 1]."""
    count, size = len(tokens), table.shape[1]
    out = empty_rows(count, size, dtype=table.dtype, device=table.device)
    squares = torch.empty(count, 1, dtype=torch.float32, device=table.device)
    _embed_kernel[(count,)](
        tokens,
        table,
        out,
        squares,
        scale,
        size,
        **row_options(size, table.device, 8),
    )
    return out, squares


@triton.jit
def _add_gated_kernel(
    total_ptr,  # [T, size]
    x_ptr,  # [T, size]: what is added
    rows_ptr,  # [T, depth]: the gate's input
    gate_ptr,  # [depth]
    size,
    depth,
    BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_DEPTH)
    weight = tl.load(gate_ptr + k, mask=k < depth, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.sum(weight * tl.load(rows_ptr + row * depth + k, mask=k < depth, other=0.0).to(tl.float32), 0)
    share = 1.0 / (1.0 + tl.exp(-gate))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = total_ptr + row * size + column
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + share * x
    tl.store(at, total.to(total_ptr.dtype.element_ty), mask=inside)


def add_gated_(total: Tensor, x: Tensor, rows: Tensor, gate: Tensor) -> Tensor:
    """total [T, size] += sigmoid(rows [T, depth] · gate [1, depth]) * x [T, size], in place; returns it."""
    size, depth = x.shape[1], rows.shape[1]
    block = min(next_power_of_2(size), 1024)
    _add_gated_kernel[(len(x), cdiv(size, block))](
        total,
        x,
        rows,
        gate,
        size,
        depth,
        BLOCK=block,
        BLOCK_DEPTH=next_power_of_2(depth),
        num_warps=4,
        **overlapping(x.device),
    )
    return total


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,  # [T, (heads + NEW * kv_heads) * D]: queries are rotated in place
    keys_ptr,  # [blocks, block_size, kv_heads, D]
    values_ptr,
    q_norm_ptr,  # [D]
    k_norm_ptr,
    cos_ptr,  # [T, pairs]
    sin_ptr,
    slots_ptr,  # [T] int32
    positions_ptr,  # [T] int32, -1 for padding rows
    tables_ptr,  # [slots, table_stride] int32
    eps,
    table_stride,
    kv_block_stride,
    kv_token_stride,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # half of D, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    H_TILE: tl.constexpr,
    KV_LIMIT: tl.constexpr,  # largest value of the cache type, 0 if no clamp is needed
    NEW: tl.constexpr,  # heads behind the queries for each key head; 1: the value is the key; 0: the cache has both
    V_NORM: tl.constexpr,  # It counts only if there is a norm.
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Load the row's destination first: it takes two dependent loads.
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if position < 0:
        return
    block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
    head = tl.program_id(1) * H_TILE + tl.arange(0, H_TILE)
    i = tl.arange(0, HALF)
    # Load a head as two halves: the rotation pairs their elements.
    half: tl.constexpr = PAIRS if HAS_ROPE else D // 2
    rest: tl.constexpr = D - 2 * half
    row_at = qkv_ptr + row * (HEADS + NEW * KV_HEADS) * D + head[:, None] * D
    exists = (head < HEADS + NEW * KV_HEADS)[:, None]
    in_half = exists & (i < half)[None, :]
    first = tl.load(row_at + i[None, :], mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(row_at + half + i[None, :], mask=in_half, other=0.0).to(tl.float32)
    in_rest = exists & (i < rest)[None, :]
    if rest > 0:
        third = tl.load(row_at + 2 * half + i[None, :], mask=in_rest, other=0.0).to(tl.float32)
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    is_query = (head < HEADS)[:, None]
    v_first, v_second = first, second  # Values are the keys before their norm and rotation if NEW is 1.
    if rest > 0:
        v_third = third
    if HAS_NORM:
        squares = pairwise_sum(first * first) + pairwise_sum(second * second)
        if rest > 0:
            squares += pairwise_sum(third * third)
        unit = tl.rsqrt(squares / D + eps)[:, None]
        kind = qkv_ptr.dtype.element_ty
        if V_NORM and NEW == 1:
            v_first, v_second = (first * unit).to(kind).to(tl.float32), (second * unit).to(kind).to(tl.float32)
            if rest > 0:
                v_third = (third * unit).to(kind).to(tl.float32)
        scale = unit
        if not V_NORM:
            scale = tl.where(is_value, 1.0, unit)
        first *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, i, half, is_query, is_value)
        first = first.to(kind).to(tl.float32)
        second *= scale * _norm_weight(q_norm_ptr + half, k_norm_ptr + half, i, half, is_query, is_value)
        second = second.to(kind).to(tl.float32)
        if rest > 0:
            third *= scale * _norm_weight(q_norm_ptr + 2 * half, k_norm_ptr + 2 * half, i, rest, is_query, is_value)
    if HAS_ROPE:
        cos = tl.load(cos_ptr + row * PAIRS + i, mask=i < PAIRS, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + row * PAIRS + i, mask=i < PAIRS, other=0.0).to(tl.float32)[None, :]
        rotated = first * cos - second * sin
        second = tl.where(is_value, second, second * cos + first * sin)
        first = tl.where(is_value, first, rotated)

    out = qkv_ptr.dtype.element_ty
    to_query = in_half & is_query
    tl.store(row_at + i[None, :], first.to(out), mask=to_query)
    tl.store(row_at + half + i[None, :], second.to(out), mask=to_query)
    if rest > 0:
        tl.store(row_at + 2 * half + i[None, :], third.to(out), mask=in_rest & is_query)
    first, second = _clamped(first, KV_LIMIT), _clamped(second, KV_LIMIT)
    if rest > 0:
        third = _clamped(third, KV_LIMIT)
    place = block * kv_block_stride + (position % BLOCK_SIZE) * kv_token_stride
    kv_type = keys_ptr.dtype.element_ty
    key_at = keys_ptr + place + (head - HEADS)[:, None] * D
    to_key = in_half & (is_query == 0) & (is_value == 0)
    tl.store(key_at + i[None, :], first.to(kv_type), mask=to_key)
    tl.store(key_at + half + i[None, :], second.to(kv_type), mask=to_key)
    if rest > 0:
        tl.store(key_at + 2 * half + i[None, :], third.to(kv_type), mask=in_rest & (is_query == 0) & (is_value == 0))
    has_value = is_value
    value_head = head - HEADS - KV_HEADS
    if NEW == 1:
        has_value = is_query == 0
        value_head = head - HEADS
        first, second = _clamped(v_first, KV_LIMIT), _clamped(v_second, KV_LIMIT)
        if rest > 0:
            third = _clamped(v_third, KV_LIMIT)
    value_at = values_ptr + place + value_head[:, None] * D
    tl.store(value_at + i[None, :], first.to(kv_type), mask=in_half & has_value)
    tl.store(value_at + half + i[None, :], second.to(kv_type), mask=in_half & has_value)
    if rest > 0:
        tl.store(value_at + 2 * half + i[None, :], third.to(kv_type), mask=in_rest & has_value)


@triton.jit
def _clamped(x, KV_LIMIT: tl.constexpr):
    """What the cache can hold; NaN stays: clamping would turn it into a number."""
    if KV_LIMIT > 0:
        x = tl.clamp(x, -KV_LIMIT, KV_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, i, limit: tl.constexpr, is_query, is_value):
    q_weight = tl.load(q_norm_ptr + i, mask=i < limit, other=0.0).to(tl.float32)[None, :]
    k_weight = tl.load(k_norm_ptr + i, mask=i < limit, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_value, 1.0, tl.where(is_query, q_weight, k_weight))


def rotate_and_store_(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    fresh: Fresh,
    *,
    num_heads: int,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
) -> None:
    """Normalise and rotate queries and keys; queries stay in `qkv`, keys and values are stored in the cache.

    qkv [T, (heads + 2 * kv_heads) * D]; keys, values [blocks, block_size, kv_heads, D]; slots, positions [T] int32
    (-1: a padding row); tables [slots, blocks] int32.
    If qkv has only one head for each key head behind the queries, values are the keys as they are in it; if it has
    none, the cache has them already.
    """
    _, block_size, kv_heads, dim = keys.shape
    q_norm, k_norm, eps, cos, sin, v_norm = fresh
    new = (qkv.shape[1] // dim - num_heads) // kv_heads
    pairs = 0 if cos is None else cos.shape[-1]
    half = pairs if cos is not None else dim // 2
    total = num_heads + new * kv_heads
    h_tile = min(next_power_of_2(total), 8)
    assert dim % 2 == 0 or cos is not None
    assert q_norm is not None or not v_norm
    _rotate_and_store_kernel[(len(qkv), cdiv(total, h_tile))](
        qkv,
        keys,
        values,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        slots,
        positions,
        tables,
        eps,
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        PAIRS=pairs,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=next_power_of_2(max(half, dim - 2 * half)),
        BLOCK_SIZE=block_size,
        H_TILE=h_tile,
        KV_LIMIT=torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else 0.0,
        NEW=new,
        V_NORM=v_norm,
        HAS_NORM=q_norm is not None,
        HAS_ROPE=cos is not None,
        num_warps=2,
        enable_fp_fusion=False,  # the kernel of invariant single tokens must round the same way
        **overlapping(qkv.device),
    )

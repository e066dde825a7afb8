"""Linear recurrences of long sequences in tiles of rows, whose parts are matrix products.

With c the running sum of the decays in a tile, L[i, j] = exp(c_i - c_j) for j <= i, and S the state before the tile:

    E = (I + strictly lower(rate * K Kᵀ * L))⁻¹ rate * (V - exp(c) * K S)     what each row adds, its "error"
    O = scale * (exp(c) * Q S + (Q Kᵀ * L) E)
    S' = exp(c_n) * S + (exp(c_n - c) * K)ᵀ E                                 after row n, which may be any row

Without the delta rule E is rate * V. `_solve_kernel` does the inverses of all tiles at once, which gives E = U - W S;
then `_scan_kernel` takes each head of a sequence through its tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping, shared_memory
from chairlift.kernels.triton.recurrent.recurrence import SlotBatch, StateRule, find_tile, num_tiles, search_width

ROWS = 64  # A tile has this many.
LEAST_SHARED_MEMORY = 131_072  # bytes that tiles of so many rows need; with less, they have half as many
BLOCK = 16  # The inverse of so many rows is a product of powers: more would lose digits.
COLUMNS = 64  # A program computes this many of the state.


@triton.jit
def _unit_rows(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def _inverse(a, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)⁻¹ of a strictly lower triangular matrix.

    The blocks on the diagonal are nilpotent: (I + d)⁻¹ = (I - d)(I + d²)(I + d⁴)(I + d⁸). Then I + a = (I + d)(I + n),
    and n is nilpotent in blocks: (I + n)⁻¹ = (I - n)(I + n²) for four of them.
    """
    i = tl.arange(0, ROWS)
    one = (i[:, None] == i[None, :]).to(tl.float32)
    same = (i[:, None] // BLOCK) == (i[None, :] // BLOCK)
    d = tl.where(same, a, 0.0)
    diagonal = one - d
    for _ in tl.static_range(3):
        d = tl.dot(d, d, input_precision=PRECISION)
        diagonal += tl.dot(diagonal, d, input_precision=PRECISION)
    n = tl.dot(diagonal, tl.where(same, 0.0, a), input_precision=PRECISION)
    outer = one - n
    outer += tl.dot(outer, tl.dot(n, n, input_precision=PRECISION), input_precision=PRECISION)
    return tl.dot(outer, diagonal, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_sequences"])
def _solve_kernel(
    k_ptr,
    v_ptr,
    decay_ptr,  # [T, heads] float32
    rate_ptr,
    starts_ptr,
    w_ptr,  # [T, heads, DIM]: the result
    u_ptr,  # [T, heads, VALUES]: the result
    num_sequences,
    k_stride,
    v_stride,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    MORE_THAN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, offset, begin, end = find_tile(starts_ptr, tl.program_id(0), num_sequences, ROWS, False, SEQUENCES)
    if (begin + offset >= end) | (end - begin <= MORE_THAN):
        return
    head = tl.program_id(1)
    row = (begin + offset + tl.arange(0, ROWS)).to(tl.int64)
    present = row < end
    i = tl.arange(0, BLOCK_DIM)
    k_mask = present[:, None] & (i < DIM)[None, :]
    k = tl.load(k_ptr + row[:, None] * k_stride + head // GROUP * DIM + i[None, :], mask=k_mask, other=0.0)
    k = k.to(tl.float32)
    if NORMALIZE:
        k = _unit_rows(k, eps)
    rate = tl.load(rate_ptr + row * HEADS + head, mask=present, other=0.0)
    c = tl.cumsum(tl.load(decay_ptr + row * HEADS + head, mask=present, other=0.0), 0)
    place = tl.arange(0, ROWS)
    lower = place[:, None] > place[None, :]
    # The exponent is at most zero where it counts; elsewhere it could overflow.
    weights = tl.where(lower, tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0)), 0.0)
    a = tl.dot(rate[:, None] * k, tl.trans(k), input_precision=PRECISION) * weights
    inverse = _inverse(a, ROWS, BLOCK, PRECISION)
    w = tl.dot(inverse, (rate * tl.exp(c))[:, None] * k, input_precision=PRECISION)
    tl.store(w_ptr + (row * HEADS + head)[:, None] * DIM + i[None, :], w.to(w_ptr.dtype.element_ty), mask=k_mask)
    column = tl.arange(0, BLOCK_VALUES)
    v_mask = present[:, None] & (column < VALUES)[None, :]
    v = tl.load(v_ptr + row[:, None] * v_stride + head * VALUES + column[None, :], mask=v_mask, other=0.0)
    u = tl.dot(inverse, rate[:, None] * v.to(tl.float32), input_precision=PRECISION)
    at = u_ptr + (row * HEADS + head)[:, None] * VALUES + column[None, :]
    tl.store(at, u.to(u_ptr.dtype.element_ty), mask=v_mask)


@triton.jit
def _scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    w_ptr,
    u_ptr,
    decay_ptr,
    rate_ptr,
    skip_ptr,
    state_ptr,  # [slots, heads, DIM, VALUES] float32
    starts_ptr,
    read_ptr,
    write_ptr,
    out_ptr,  # [T, heads, VALUES]
    q_stride,
    k_stride,
    v_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    MORE_THAN: tl.constexpr,
    DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    begin = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    if end - begin <= MORE_THAN:
        return
    i = tl.arange(0, BLOCK_DIM)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < VALUES
    s_mask = (i < DIM)[:, None] & inside[None, :]
    s_at = (head * DIM + i)[:, None] * VALUES + column[None, :]
    slot = tl.load(read_ptr + sequence).to(tl.int64)
    s = tl.load(state_ptr + slot * HEADS * DIM * VALUES + s_at, mask=s_mask & (slot >= 0), other=0.0)
    place = tl.arange(0, ROWS)
    causal = place[:, None] >= place[None, :]
    for first in range(begin, end, ROWS):
        row = (first + place).to(tl.int64)
        present = row < end
        k_mask = present[:, None] & (i < DIM)[None, :]
        v_mask = present[:, None] & inside[None, :]
        q = tl.load(q_ptr + row[:, None] * q_stride + head // GROUP * DIM + i[None, :], mask=k_mask, other=0.0)
        k = tl.load(k_ptr + row[:, None] * k_stride + head // GROUP * DIM + i[None, :], mask=k_mask, other=0.0)
        q, k = q.to(tl.float32), k.to(tl.float32)
        if NORMALIZE:
            q, k = _unit_rows(q, eps), _unit_rows(k, eps)
        # Rows that are not there have decay 0 and add nothing, so c is constant behind the last row.
        c = tl.cumsum(tl.load(decay_ptr + row * HEADS + head, mask=present, other=0.0), 0)
        v_at = row[:, None] * v_stride + head * VALUES + column[None, :]
        if DELTA:
            w_at = (row * HEADS + head)[:, None] * DIM + i[None, :]
            u_at = (row * HEADS + head)[:, None] * VALUES + column[None, :]
            w = tl.load(w_ptr + w_at, mask=k_mask, other=0.0).to(tl.float32)
            error = tl.load(u_ptr + u_at, mask=v_mask, other=0.0).to(tl.float32)
            error -= tl.dot(w, s, input_precision=PRECISION)
        else:
            rate = tl.load(rate_ptr + row * HEADS + head, mask=present, other=0.0)
            error = rate[:, None] * tl.load(v_ptr + v_at, mask=v_mask, other=0.0).to(tl.float32)
        weights = tl.where(causal, tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0)), 0.0)
        p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * weights
        out = tl.dot(q * tl.exp(c)[:, None], s, input_precision=PRECISION)
        out += tl.dot(p, error, input_precision=PRECISION)
        out *= scale
        if HAS_SKIP:
            out += tl.load(skip_ptr + head) * tl.load(v_ptr + v_at, mask=v_mask, other=0.0).to(tl.float32)
        at = out_ptr + (row * HEADS + head)[:, None] * VALUES + column[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=v_mask)
        # The states that are kept, one after the other; usually there is none, or the last one.
        target = tl.load(write_ptr + row, mask=present, other=-1)
        due = tl.where(target >= 0, place, ROWS)
        n = tl.min(due, 0)
        while n < ROWS:
            c_n = tl.sum(tl.where(place == n, c, 0.0), 0)
            after = _state_after(s, k, error, c, c_n, place <= n, PRECISION)
            slot_n = tl.sum(tl.where(place == n, target, 0), 0).to(tl.int64)
            tl.store(state_ptr + slot_n * HEADS * DIM * VALUES + s_at, after, mask=s_mask)
            n = tl.min(tl.where(place > n, due, ROWS), 0)
        s = _state_after(s, k, error, c, tl.min(c, 0), present, PRECISION)


@triton.jit
def _state_after(s, k, error, c, c_n, until, PRECISION: tl.constexpr):
    """The state after a row of a tile, from the state before the tile."""
    left = tl.where(until, tl.exp(tl.minimum(c_n - c, 0.0)), 0.0)
    return tl.exp(c_n) * s + tl.dot(tl.trans(k * left[:, None]), error, input_precision=PRECISION)


def run_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    rule: StateRule,
    state: Tensor,
    batch: SlotBatch,
    skip: Tensor | None,
    out: Tensor,
    *,
    more_than: int,
) -> None:
    """Fill the rows of `out` that belong to sequences with more than `more_than` rows."""
    rows = ROWS if shared_memory(v.device) >= LEAST_SHARED_MEMORY else ROWS // 2
    heads, values = v.shape[1:]
    key_heads, dim = q.shape[1:]
    block_dim, block_values = (max(16, next_power_of_2(size)) for size in (dim, values))
    # Errors of the inverse grow with the tile: three passes in 19 bits are close to float32.
    exact = v.dtype is torch.float32
    options: dict[str, Any] = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "DIM": dim,
        "VALUES": values,
        "MORE_THAN": more_than,
        "NORMALIZE": rule.normalize,
        "ROWS": rows,
        "BLOCK_DIM": block_dim,
        **overlapping(v.device),
    }
    w = u = v
    if rule.delta:
        w = torch.empty(len(v), heads, dim, dtype=v.dtype, device=v.device)
        u = torch.empty(len(v), heads, values, dtype=v.dtype, device=v.device)
        _solve_kernel[(num_tiles(batch, rows), heads)](
            k,
            v,
            decay,
            rate,
            batch.starts,
            w,
            u,
            len(batch.read),
            k.stride(0),
            v.stride(0),
            rule.eps,
            BLOCK=BLOCK,
            BLOCK_VALUES=block_values,
            SEQUENCES=search_width(batch),
            PRECISION="ieee" if exact else "tf32x3",
            num_warps=4,
            **options,
        )
    columns = min(COLUMNS, block_values)
    _scan_kernel[(len(batch.read) * heads, cdiv(values, columns))](
        q,
        k,
        v,
        w,
        u,
        decay,
        rate,
        rate if skip is None else skip,
        state,
        batch.starts,
        batch.read,
        batch.write,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        rule.scale,
        rule.eps,
        DELTA=rule.delta,
        HAS_SKIP=skip is not None,
        COLUMNS=columns,
        PRECISION="ieee" if exact else "tf32",
        num_warps=4,
        **options,
    )

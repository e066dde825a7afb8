"""Turns sums of latents of few rows into sums of values, behind the absorbed form."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import precision_for
from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping

MOST_ROWS = 32  # A tile has no more.
COLUMNS = 32  # A program multiplies this many of a head's values.


@triton.jit(do_not_specialize=["T"])
def _values_kernel(
    sums_ptr,  # [T, HEADS, RANK]
    up_ptr,  # [HEADS, NOPE + VALUE, RANK]: the last rows of each head are those of values
    out_ptr,  # [T, HEADS, VALUE]
    T,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1)
    column = tl.program_id(2) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK_PADDED)
    up_at = up_ptr + (head * (NOPE + VALUE) + NOPE + column)[:, None] * RANK + r[None, :]
    up = tl.load(up_at, mask=(column < VALUE)[:, None] & (r < RANK)[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = m.to(tl.int64) * HEADS + head
    sums = tl.load(sums_ptr + row[:, None] * RANK + r[None, :], mask=(m < T)[:, None] & (r < RANK)[None, :], other=0.0)
    found = tl.dot(sums, tl.trans(up), input_precision=PRECISION)
    out_at = out_ptr + row[:, None] * VALUE + column[None, :]
    tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=(m < T)[:, None] & (column < VALUE)[None, :])


def values_of(sums: Tensor, up: Tensor, nope_dim: int) -> Tensor:
    """Sums of latents [T, heads, rank] as sums of values [T, heads, value], by up [heads, nope + value, rank]."""
    rows, num_heads, rank = sums.shape
    value_dim = up.shape[1] - nope_dim
    out = empty_rows(rows, num_heads, value_dim, dtype=sums.dtype, device=sums.device)
    height = min(MOST_ROWS, max(16, next_power_of_2(rows)))
    columns = min(COLUMNS, max(16, next_power_of_2(value_dim)))
    _values_kernel[(cdiv(rows, height), num_heads, cdiv(value_dim, columns))](
        sums,
        up,
        out,
        rows,
        HEADS=num_heads,
        NOPE=nope_dim,
        VALUE=value_dim,
        RANK=rank,
        RANK_PADDED=max(16, next_power_of_2(rank)),
        BM=height,
        BN=columns,
        PRECISION=precision_for(sums.dtype),
        num_warps=4,
        **overlapping(sums.device),
    )
    return out

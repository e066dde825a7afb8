"""Matrix products with few rows, as decode steps have them: all that counts is how fast the weights are read.

The addition to the residual stream rides along, since every kernel less is microseconds saved. (Norms and activations
do not: with arithmetic on what is loaded, the loads no longer run far enough ahead. Measured.)

Outputs with few columns do not fill the chip; their sum is split among several programs, and the last one to finish
adds the parts up, always in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton_launch import overlapping

SMALL_WEIGHTS = 8 * 2**20
PROGRAMS = 160  # about one for each multiprocessor of a Hopper chip


@triton.jit
def _skinny_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    out_ptr,  # [M, N]; with RESIDUAL the product is added to what is there
    partial_ptr,  # [programs, SPLITS, BM, BN] float32
    arrived_ptr,  # [programs] int32, all zero between launches
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    is_row = (m < M)[:, None]
    is_column = (n < N)[:, None]
    per_split = tl.cdiv(K, SPLITS * BK) * BK
    begin = split * per_split
    end = tl.minimum(begin + per_split, K)
    acc = tl.zeros([BM, BN], tl.float32)
    w_at = weight_ptr + n.to(tl.int64)[:, None] * K
    for at in range(begin, end, BK):
        kk = at + k
        inside = (kk < end)[None, :]
        w = tl.load(w_at + kk[None, :], mask=is_column & inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + m[:, None] * K + kk[None, :], mask=is_row & inside, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)

    kind = out_ptr.dtype.element_ty
    out_at = out_ptr + m[:, None] * N + n[None, :]
    keep = is_row & (n < N)[None, :]
    if SPLITS > 1:
        tile = m[:, None] * BN + tl.arange(0, BN)[None, :]
        parts = partial_ptr + block.to(tl.int64) * SPLITS * BM * BN
        tl.store(parts + split * BM * BN + tile, acc, mask=is_row)
        tl.debug_barrier()
        counter = arrived_ptr + block
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.debug_barrier()
            acc = tl.zeros([BM, BN], tl.float32)
            for other in range(SPLITS):
                acc += tl.load(parts + other * BM * BN + tile, mask=is_row, other=0.0, volatile=True)
            if RESIDUAL:
                acc += tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
            tl.store(out_at, acc.to(kind), mask=keep)
            tl.store(counter, 0)
    else:
        if RESIDUAL:
            acc += tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_at, acc.to(kind), mask=keep)


@cache
def _scratch(size: int, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kernels of one stream run one after the other, so they can share this."""
    return torch.empty(size, device=device), torch.zeros(programs, dtype=torch.int32, device=device)


class Tiling(NamedTuple):
    width: int  # columns of the result that a program computes
    depth: int  # of the sum that it loads at once
    splits: int  # programs that share the sum of one column
    stages: int


@cache
def _tiling(columns: int, depth: int) -> Tiling:
    """The best found on an H200: small weights want one program for each of its multiprocessors, large ones two."""
    small = columns * depth <= SMALL_WEIGHTS
    width = 64 if (small and columns > 4096) or depth > 8192 else 32
    programs = triton.cdiv(columns, width)
    wanted = (PROGRAMS if small else 2 * PROGRAMS) // programs
    splits = 2 ** max(0, wanted.bit_length() - 1)
    return Tiling(width, 128 if depth <= 8192 else 64, min(splits, 8, max(1, depth // 512)), 4 if depth <= 8192 else 6)


def skinny_linear(x: Tensor, weight: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed; with `add_to` [M, N] it is added to that in place."""
    rows, depth = x.shape
    columns = len(weight)
    out = add_to if add_to is not None else torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    height = max(16, triton.next_power_of_2(rows))
    tiling = _tiling(columns, depth)
    width, splits = tiling.width, tiling.splits
    programs = triton.cdiv(columns, width)
    partial, arrived = _scratch(programs * splits * height * width if splits > 1 else 1, programs, x.device)
    _skinny_kernel[(programs, splits)](
        x,
        weight,
        out,
        partial,
        arrived,
        rows,
        columns,
        depth,
        BM=height,
        BN=width,
        BK=tiling.depth,
        SPLITS=splits,
        RESIDUAL=add_to is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=tiling.stages if x.dtype != torch.float32 else 2,
        **overlapping(x.device),
    )
    return out

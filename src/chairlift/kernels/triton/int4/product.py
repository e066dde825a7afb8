"""Launches products with 4-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor

from chairlift.kernels.triton.int4.kernel import dequantize_kernel, int4_product_kernel
from chairlift.kernels.triton.int4.matrix import Int4Matrix
from chairlift.kernels.triton.int4.tiling import (
    Int4Tiling,
    Int4VectorTiling,
    choose_int4_tiling,
    choose_int4_vector_tiling,
    fitting_int4,
    invariant_int4_tiling,
)
from chairlift.kernels.triton.int4.vector import int4_vector_kernel
from chairlift.kernels.triton.launch import (
    cdiv,
    described_rows,
    empty_rows,
    has_asm,
    next_power_of_2,
    overlapping,
    reads_ahead,
    split_scratch,
    tuned,
)


def int4_product(
    x: Tensor,
    weight: Int4Matrix,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    next_norm: Tensor | None = None,
    invariant: bool = False,
    tiling: Int4Tiling | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x [M, K] times weight [N, K] transposed; with `add_to`, also the partial sums of squares of the result's rows,
    and the result times `next_norm` [N] if given.

    `squares` [M, parts]: normalise each row of x by these partial sums of squares.
    `gated`: weight is [2 N, K]; the result is silu(first half) * second half.
    `add_to` [M, N]: add the result to it in place.
    `invariant`: make each row the same, bit for bit, however many rows there are.
    """
    rows, depth = x.shape
    columns = weight.rows // (2 if gated else 1)
    assert x.is_contiguous()
    if tiling is None and rows == 1 and not invariant and tuned() and x.element_size() == 2:
        vector_tiling = choose_int4_vector_tiling(columns, depth, weight.group, weight.has_offsets, gated)
        if vector_tiling is not None and x.data_ptr() % 16 == weight.words.data_ptr() % 16 == 0:
            return int4_vector_product(
                x, weight, vector_tiling, squares=squares, eps=eps, bias=bias, gated=gated, add_to=add_to,
                next_norm=next_norm,
            )  # fmt: skip
    if tiling is None and (invariant or not tuned()):
        tiling = invariant_int4_tiling(columns, depth, weight.group)
    tiling = tiling or choose_int4_tiling(rows, columns, depth, gated, weight.group)
    tiling = fitting_int4(tiling, weight.run, gated and not tiling.joint, x.device)
    out = add_to if add_to is not None else empty_rows(rows, columns, dtype=x.dtype, device=x.device)
    scaled = None if next_norm is None else empty_rows(rows, columns, dtype=x.dtype, device=x.device)
    joint = gated and tiling.joint
    across = cdiv(columns, tiling.columns // (2 if joint else 1))
    programs = cdiv(rows, tiling.rows) * across
    tile = tiling.rows * tiling.columns * (2 if gated and not joint else 1)
    partial, arrived = split_scratch(programs * tiling.splits * tile if tiling.splits > 1 else 1, programs, x.device)
    squares_out = None if add_to is None else torch.empty(rows, across, dtype=torch.float32, device=x.device)
    described = tiling.described and reads_ahead(x.device)
    num_squares = 0 if squares is None else squares.shape[1]
    int4_product_kernel[(cdiv(rows, tiling.rows), across, tiling.splits)](
        x,
        described_rows(x, tiling.rows, weight.run) if described else x,
        weight.words,
        weight.scales,
        x if bias is None else bias,
        out,
        x if next_norm is None else next_norm,
        out if scaled is None else scaled,
        partial if squares is None else squares,
        partial if squares_out is None else squares_out,
        partial,
        arrived,
        rows,
        columns,
        depth,
        weight.words.shape[1] * weight.run,
        eps,
        BM=tiling.rows,
        BN=tiling.columns,
        H=weight.run,
        GROUPS=4 * weight.run // weight.group,
        OFFSETS=weight.has_offsets,
        HALF=weight.half,
        SPLITS=tiling.splits,
        STAGES=tiling.stages,
        SQUARES=num_squares,
        SQUARES_PADDED=next_power_of_2(max(1, num_squares)),
        GATED=gated,
        RESIDUAL=add_to is not None,
        SCALED=scaled is not None,
        BIAS=bias is not None,
        EVEN_DEPTH=depth % (4 * weight.run) == 0,
        FEW=tiling.few,
        DIRECT=tiling.direct,
        JOINT=joint,
        DESCRIBED=described,
        PREFETCH=tiling.prefetch,
        ASM=has_asm(x.device),
        num_warps=tiling.warps,
        **overlapping(x.device),
    )
    return out, squares_out, scaled


def int4_vector_product(
    x: Tensor,
    weight: Int4Matrix,
    tiling: Int4VectorTiling,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    next_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`int4_product` of a single row in a 16-bit type, whose columns are full chunks."""
    depth = x.shape[1]
    columns = weight.rows // (2 if gated else 1)
    assert x.shape == (1, weight.columns)
    assert depth % (4 * weight.run) == 0
    assert columns % tiling.columns == 0
    assert tiling.depth >= 1024 * tiling.warps  # the two elements of a thread have to be neighbours
    assert x.data_ptr() % 16 == weight.words.data_ptr() % 16 == 0
    out = add_to if add_to is not None else empty_rows(1, columns, dtype=x.dtype, device=x.device)
    scaled = None if next_norm is None else empty_rows(1, columns, dtype=x.dtype, device=x.device)
    across = columns // tiling.columns
    squares_out = None if add_to is None else torch.empty(1, across, dtype=torch.float32, device=x.device)
    num_squares = 0 if squares is None else squares.shape[1]
    steps = cdiv(depth, tiling.depth)
    int4_vector_kernel[(across,)](
        x,
        x.flatten().view(torch.int64),
        weight.words.view(torch.int64),
        weight.scales if weight.has_offsets else weight.scales.view(torch.int16),
        x if bias is None else bias,
        out,
        x if next_norm is None else next_norm,
        out if scaled is None else scaled,
        weight.scales if squares is None else squares,
        weight.scales if squares_out is None else squares_out,
        columns,
        depth,
        eps,
        BN=tiling.columns,
        BK=tiling.depth,
        STEPS=steps,
        AHEAD=min(tiling.ahead, steps),
        H=weight.run,
        GROUPS=4 * weight.run // weight.group,
        OFFSETS=weight.has_offsets,
        HALF=weight.half,
        EVEN=depth % tiling.depth == 0,
        SQUARES=num_squares,
        SQUARES_PADDED=next_power_of_2(max(1, num_squares)),
        GATED=gated,
        RESIDUAL=add_to is not None,
        SCALED=scaled is not None,
        BIAS=bias is not None,
        ASM=has_asm(x.device),
        num_warps=tiling.warps,
        **overlapping(x.device),
    )
    return out, squares_out, scaled


def dequantize(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix [rows, columns]."""
    out = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.words.device)
    panels, chunks, _, run = weight.words.shape
    dequantize_kernel[(chunks, panels)](
        weight.words,
        weight.scales,
        out,
        weight.rows,
        weight.columns,
        chunks * run,
        H=run,
        GROUPS=4 * run // weight.group,
        OFFSETS=weight.has_offsets,
        HALF=weight.half,
        num_warps=1,
        **overlapping(out.device),
    )
    return out

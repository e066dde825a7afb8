"""Launches products with few rows."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from chairlift.kernels.triton.fp8 import PAIR
from chairlift.kernels.triton.launch import (
    cdiv,
    described_rows,
    empty_rows,
    next_power_of_2,
    overlapping,
    reads_ahead,
    split_scratch,
)
from chairlift.kernels.triton.products.activation import ACTIVATIONS
from chairlift.kernels.triton.products.kernel import product_kernel
from chairlift.kernels.triton.products.tiling import (
    ProductTiling,
    choose_paired_tiling,
    choose_rounded_tiling,
    choose_tiling,
    fitting,
    invariant_tiling,
    num_stages,
)

PART_UNIT = 256  # columns: parts of invariant sums are multiples of it, as long as the longest tile
MOST_EARLY_SQUARES = 512  # A warp keeps no more of an invariant product: they are 16 registers of a thread.
PARALLEL_ELEMENTS = 2**21  # The splits of an invariant sum have their own programs if the result has no more elements.


def product(
    x: Tensor,
    weight: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    times: Tensor | None = None,
    activation: str = "silu",
    add_to: Tensor | None = None,
    weight_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    pairs_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiling: ProductTiling | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """x [M, K] times weight [N, K] transposed; with `add_to`, also the partial sums of squares of the result's rows.

    `squares` [M, parts]: normalise each row of x by these partial sums of squares.
    `gated`: weight is [2 N, K]; the result is activation(first half) * second half.
    `times` [M, N], whose rows may lie within longer ones: the result is activation(product) * times.
    `activation`: one of `activation.ACTIVATIONS`.
    `add_to` [M, N]: add the result to it in place.
    `weight_scales` [N] or [2 N]: the weight is in 8-bit floats, with a scale for each row.
    `x_scales` [M]: x is, too, and the result is of `out_dtype`.
    `pairs_out` [2 M, N]: where the result is written as pairs of rows (see `fp8.pairs_of`). x may be such pairs
        [2 M, K]; then the result is of `out_dtype`.
    `invariant`: a row of the result is bit for bit the same for any number of rows.
    """
    assert activation in ACTIVATIONS
    assert times is None or (times.stride(1) == 1 and not gated)
    pairs = x.dtype is PAIR
    x_rows, depth = x.shape
    rows = x_rows // 2 if pairs else x_rows
    columns = len(weight) // (2 if gated else 1)
    if tiling is None and invariant:
        assert weight_scales is None
        tiling = invariant_tiling(rows, columns, depth, gated, x.dtype, x.device)
    choose = choose_tiling if weight_scales is None else choose_paired_tiling if pairs else choose_rounded_tiling
    tiling = tiling or choose(rows, columns, depth, gated)
    tiling = fitting(tiling, gated, x.dtype, weight.dtype, x.device)
    in_sequence = invariant and tiling.splits > 1 and rows * columns > PARALLEL_ELEMENTS
    out = add_to if add_to is not None else empty_rows(rows, columns, dtype=out_dtype or x.dtype, device=x.device)
    across = cdiv(columns, tiling.columns)
    blocks = cdiv(x_rows, tiling.rows)
    programs = blocks * across
    tile = tiling.rows * tiling.columns * (2 if gated else 1)
    stored = programs * tiling.splits * tile if tiling.splits > 1 and not in_sequence else 1
    partial, arrived = split_scratch(stored, programs if stored > 1 else 1, x.device)
    squares_out = None if add_to is None else torch.empty(rows, across, dtype=torch.float32, device=x.device)
    assert x.is_contiguous()
    described = tiling.described and reads_ahead(x.device)
    num_squares = 0 if squares is None else squares.shape[1]
    padded_squares = next_power_of_2(max(1, num_squares))
    unit = tiling.splits * (PART_UNIT if invariant else tiling.depth)
    grid = (programs, 1) if tiling.band else (blocks, across)
    product_kernel[(*grid, 1 if in_sequence else tiling.splits)](
        x,
        weight,
        described_rows(x, tiling.rows, tiling.depth) if described else x,
        TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.depth]) if described else weight,
        partial if weight_scales is None else weight_scales,
        partial if x_scales is None else x_scales,
        weight if bias is None else bias,
        x if times is None else times,
        out,
        out if pairs_out is None else pairs_out,
        partial if squares is None else squares,
        partial if squares_out is None else squares_out,
        partial,
        arrived,
        rows,
        columns,
        depth,
        0 if times is None else times.stride(0),
        cdiv(depth, unit) * unit // tiling.splits,
        eps,
        _reach(depth),
        BM=tiling.rows,
        BN=tiling.columns,
        BK=tiling.depth,
        SPLITS=tiling.splits,
        IN_SEQUENCE=in_sequence,
        BAND=tiling.band,
        SQUARES=num_squares,
        SQUARES_PADDED=padded_squares,
        LATE=invariant and tiling.rows * padded_squares > MOST_EARLY_SQUARES * tiling.warps,
        EIGHT_BITS=weight_scales is not None,
        ROUNDED=x_scales is not None,
        PAIRS=pairs,
        SPLIT=pairs_out is not None,
        GATED=gated,
        TIMES=times is not None,
        ACTIVATION=activation,
        RESIDUAL=add_to is not None,
        BIAS=bias is not None,
        EVEN_DEPTH=depth % tiling.depth == 0,
        SWAPPED=tiling.rows < 64 and tiling.columns >= 64,
        DESCRIBED=described,
        PREFETCH=tiling.prefetch,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=num_stages(tiling, gated, x.dtype, weight.dtype, x.device),
        enable_fp_fusion=not invariant,  # The tile decides which products are fused with sums.
        **overlapping(x.device),
    )
    return out, squares_out


@cache
def _reach(depth: int) -> float:
    """A power of two by which normalised rows of `depth` elements can be scaled within e4m3. None is above the square
    root of their number; a factor of four is left for the weights of norms that are not part of the matrix."""
    return float(2.0 ** math.floor(math.log2(448.0 / math.sqrt(depth)) - 2))

"""Launches products with 4-bit weights, in tiles that suit their shape."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift.kernels.triton.int4.kernel import dequantize_kernel, int4_product_kernel
from chairlift.kernels.triton.int4.matrix import Int4Matrix
from chairlift.kernels.triton.int4.vector import int4_vector_kernel
from chairlift.kernels.triton.launch import (
    cdiv,
    described_rows,
    empty_rows,
    has_asm,
    last_power_of_2,
    next_power_of_2,
    overlapping,
    reads_ahead,
    shared_memory,
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


MOST_SPLITS = 8
SPARE_SHARED = 8 * 2**10  # bytes of shared memory besides the tiles, rounded up
SCALE_WORDS = 8  # 16-bit words of scales and offsets of a row in a chunk, at most


class Int4Tiling(NamedTuple):
    """Tile of one program, splits of the sum, pipeline depth."""

    rows: int
    columns: int
    splits: int
    stages: int
    warps: int
    few: bool = True  # scale the sums of each group, not the weights
    prefetch: int = 2  # chunks
    described: bool = False  # activations are copied by the tensor memory accelerator
    direct: bool = False  # dequantize weights and add their products to one sum
    joint: bool = False  # half of the columns are the gate's


class Int4VectorTiling(NamedTuple):
    """Tile of one program of the product of a single row without tensor cores."""

    columns: int
    depth: int  # columns of the weight at a time: at least 1,024 for each warp, since a thread reads 16 bytes of a row
    warps: int
    ahead: int  # tiles in flight, 1 or 2


MOST_STEPS = 16  # tiles of a program; its loop is unrolled


@cache
def choose_int4_vector_tiling(
    columns: int, depth: int, group: int, has_offsets: bool, gated: bool
) -> Int4VectorTiling | None:
    """The tile of a single row; None where the kernel with tensor cores is faster or this one does not serve the shape.

    The best of nine or ten tiles for each product of the Llama-3-8B shape, within whole layers on an H200. A layer
    takes 47 µs with groups of 128 (55 with tensor cores), 55 with groups of 128 and offsets (70), and 68 with groups of
    32 and offsets (76). With groups of 32 gate and up keep tensor cores; without them a layer takes 8 µs longer.
    Smaller groups without offsets are not measured."""
    if depth % (4 * min(group, 64)) or columns % 16 or depth > MOST_STEPS * 4096:
        return None
    if gated and group < 128:
        return None
    is_long = depth > 2 * columns
    if is_long and has_offsets and group == 128 and depth >= 4096:
        return Int4VectorTiling(8, 4096, 4, 1)
    warps = 1 if depth <= 1024 else 2 if depth <= MOST_STEPS * 2048 else 4
    narrow = gated or is_long or depth < columns
    ahead = 2 if is_long and not has_offsets and depth > 1024 * warps else 1
    return Int4VectorTiling(4 if narrow else 8, 1024 * warps, warps, ahead)


def _splits(tiles: int, programs: int, depth: int, group: int, least: int = 4) -> int:
    """Splits of the sum that give this number of programs, with at least `least` chunks each."""
    chunks = cdiv(depth, 4 * min(group, 64))
    return max(1, min(last_power_of_2(cdiv(programs, tiles)), MOST_SPLITS, chunks // least))


@cache
def invariant_int4_tiling(columns: int, depth: int, group: int) -> Int4Tiling:
    """Tiling by the weight's shape alone, so that it does not depend on the batch."""
    return Int4Tiling(64, 64, _splits(cdiv(columns, 64), 150, depth, group), 3, 4, few=False)


@cache
def choose_int4_tiling(rows: int, columns: int, depth: int, gated: bool, group: int) -> Int4Tiling:
    """The best of 10 to 45 tilings per kind of product of the Llama-3-8B shape on an H200, or one nearly as fast, in
    groups of 128, within the four products of a layer over many weights; those of groups of 32 were found earlier."""

    def splits(height: int, width: int, programs: int) -> int:
        return _splits(cdiv(rows, height) * cdiv(columns, width), programs, depth, group)

    if rows <= 32 and group == 32:
        height = 8 if rows <= 8 else 16 if rows <= 16 else 32
        return Int4Tiling(
            height, 64, splits(height, 64, 500 if height == 8 else 400), 3 if height == 32 else 4, 2, height == 8
        )
    if rows <= 8:
        if gated:
            return Int4Tiling(8, 64, splits(8, 64, 220), 5, 4, few=False)
        if columns <= 64 * 64:
            return Int4Tiling(8, 64, splits(8, 64, 500), 5, 2, few=False)
        return Int4Tiling(8, 64, _splits(cdiv(columns, 64), 768, depth, group, least=2), 3, 2, few=False)
    if rows <= 32:
        height = 16 if rows <= 16 else 32
        if gated:
            return Int4Tiling(height, 64, splits(height, 64, 220), 5 if height == 16 else 3, 4, few=False)
        return Int4Tiling(height, 64, splits(height, 64, 250 if columns > 64 * 64 else 400), 5, 4, few=False)
    if rows > 128:
        return _many_rows(columns, gated)
    if gated:
        return Int4Tiling(64, 128, splits(64, 128, 110), 3, 8, few=False)
    if rows <= 64:
        if columns <= 64 * 64 and depth < 8192:
            return Int4Tiling(64, 128, splits(64, 128, 128), 4, 8, few=False, described=True)
        return Int4Tiling(64, 64, splits(64, 64, 250 if depth >= 8192 else 150), 3, 4, few=False, described=True)
    parts = _splits(1, 128 // cdiv(columns, 64), depth, group)
    return Int4Tiling(128, 64, parts, 3, 4, few=False, described=True)


def _many_rows(columns: int, gated: bool) -> Int4Tiling:
    """With more than 128 rows there are enough tiles without splitting sums; weights are dequantized."""
    if gated:
        return Int4Tiling(128, 256, 1, 3, 8, few=False, described=True, direct=True, joint=True)
    if columns > 64 * 64:
        return Int4Tiling(64, 256, 1, 4, 8, few=False, described=True, direct=True)
    return Int4Tiling(128, 64, 1, 3, 4, few=False, described=True, direct=True)


@cache
def fitting_int4(tiling: Int4Tiling, run: int, gated: bool, device: torch.device) -> Int4Tiling:
    """Reduce stages, then columns, then rows until two stages fit into shared memory."""
    narrow = tiling._replace(columns=min(64, tiling.columns), warps=min(4, tiling.warps))
    for one in (tiling, narrow, narrow._replace(rows=min(64, tiling.rows)), narrow._replace(rows=min(32, tiling.rows))):
        words = one.columns * (run + SCALE_WORDS) * (2 if gated else 1) * 2
        # Of the words, which are read into registers, one tile less is kept than of the activations.
        stages = (shared_memory(device) - SPARE_SHARED + words) // (words + one.rows * 4 * run * 2)
        if stages >= 2:
            break
    return one._replace(stages=max(1, min(stages, tiling.stages)))

"""Rounds rows of activations to fp8, in one pass with the operation that makes them, or splits them into pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows, row_options

PAIR = torch.float8_e5m2
IS_PLAIN, IS_NORM, IS_GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _sum_and_most(sum_a, most_a, sum_b, most_b):
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [T, size]; IS_NORM: the residual stream, changed in place if there is a delta; IS_GATED: [T, 2 * size]
    delta_ptr,  # [T, size]
    weight_ptr,  # [size], of the norm
    numbers_ptr,  # [T, size] e4m3
    scales_ptr,  # [T] float32
    size,
    eps,
    KIND: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    if KIND == IS_NORM:
        weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind = x_ptr.dtype.element_ty
    if KIND == IS_GATED:
        gate = tl.load(x_ptr + row * 2 * size + lane, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + (row * 2 + 1) * size + lane, mask=inside, other=0.0).to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate)) * up
    else:
        x = tl.load(x_ptr + row * size + lane, mask=inside, other=0.0).to(tl.float32)
    if KIND == IS_NORM and HAS_DELTA:
        total = x + tl.load(delta_ptr + row * size + lane, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(kind)
        tl.store(x_ptr + row * size + lane, rounded, mask=inside)
        x = rounded.to(tl.float32)
    # The largest magnitude as bits: NaN has the most, so that the scale of a bad row is NaN.
    if KIND == IS_NORM:  # what the norm divides by is part of the scale alone
        squares = x * x
        x *= weight
        squares, most = tl.reduce((squares, tl.abs(x).to(tl.int32, bitcast=True)), 0, _sum_and_most)
        norm = tl.rsqrt(squares / size + eps)
    else:
        most = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
        norm = 1.0
    most = most.to(tl.float32, bitcast=True)
    tl.store(scales_ptr + row, most * norm / LARGEST)
    factor = tl.where(most > 0.0, LARGEST / tl.where(most > 0.0, most, 1.0), 0.0)
    x = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)  # rounding may exceed it slightly
    tl.store(numbers_ptr + row * size + lane, x.to(numbers_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _upper_byte(x):
    """The upper byte of a float16, rounded to it: an e5m2 number, and as float32."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    byte = tl.where(x == x, bits + 128, bits) >> 8  # NaN has no room for the addition
    return byte.to(tl.uint8).to(tl.float8e5, bitcast=True), (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(
        tl.float32
    )


@triton.jit
def split_terms(x):
    """Two e5m2 numbers whose sum is x within 1/64; they have its range without a scale."""
    LARGEST: tl.constexpr = 57344.0
    wide = tl.maximum(x.to(tl.float32), -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    wide = tl.minimum(wide, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    high, number = _upper_byte(wide)
    low, _ = _upper_byte(wide - number)
    return high, low


@triton.jit
def _split_rows_kernel(
    x_ptr,  # [T, size]
    pairs_ptr,  # [2 * T, size] e5m2
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    high, low = split_terms(tl.load(x_ptr + row * size + lane, mask=lane < size, other=0.0))
    tl.store(pairs_ptr + 2 * row * size + lane, high, mask=lane < size)
    tl.store(pairs_ptr + (2 * row + 1) * size + lane, low, mask=lane < size)


def pairs_of(x: Tensor) -> Tensor:
    """Split each row of x [T, size] into two rows of 8-bit floats whose sum it is, with a deviation of 0.3%."""
    rows, size = x.shape
    pairs = empty_pairs(rows, size, x.device)
    if rows:
        _split_rows_kernel[(rows,)](x, pairs, size, **row_options(size, x.device))
    return pairs


def empty_pairs(rows: int, size: int, device: torch.device) -> Tensor:
    """Allocate pairs of `rows` rows."""
    return empty_rows(2 * rows, size, dtype=PAIR, device=device)


def round_rows(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Quantize x [T, size] to e4m3 with magnitudes up to `largest`; returns it with the scale of each row [T]."""
    return _rounded(x.contiguous(), x.shape[1], largest, IS_PLAIN)


def norm_rounded(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, largest: float) -> tuple[Tensor, Tensor]:
    """Add `delta` to the residual stream `x` [T, size] in place, and quantize the RMS norm of the sum."""
    return _rounded(x, x.shape[1], largest, IS_NORM, delta, weight, eps)


def silu_mul_rounded(gate_up: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Quantize silu(gate) * up of gate_up [T, 2 * size], the gate's columns first."""
    return _rounded(gate_up, gate_up.shape[1] // 2, largest, IS_GATED)


def _rounded(
    x: Tensor,
    size: int,
    largest: float,
    kind: tl.constexpr,
    delta: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    rows = len(x)
    numbers = empty_rows(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _round_rows_kernel[(rows,)](
            x,
            x if delta is None else delta,
            x if weight is None else weight,
            numbers,
            scales,
            size,
            eps,
            KIND=kind.value,
            HAS_DELTA=delta is not None,
            LARGEST=largest,
            **row_options(size, x.device),
        )
    return numbers, scales

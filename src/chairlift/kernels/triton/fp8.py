"""Quantizes rows of activations to fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import next_power_of_2, overlapping


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [T, size]
    numbers_ptr,  # [T, size] e4m3
    scales_ptr,  # [T] float32
    size,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    highest = tl.zeros([BLOCK], tl.float32)
    for at in range(0, size, BLOCK):
        x = tl.load(x_ptr + row * size + at + lane, mask=at + lane < size, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    # The maximum and the clamp below drop NaN; the scale keeps it, so that bad rows stay bad.
    is_bad = tl.max((highest != highest).to(tl.int32), 0) > 0
    scale = tl.where(is_bad, float("nan"), tl.max(highest, 0) / LARGEST)
    factor = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    tl.store(scales_ptr + row, scale)
    for at in range(0, size, BLOCK):
        x = tl.load(x_ptr + row * size + at + lane, mask=at + lane < size, other=0.0).to(tl.float32)
        x = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)  # rounding may exceed it slightly
        tl.store(numbers_ptr + row * size + at + lane, x.to(numbers_ptr.dtype.element_ty), mask=at + lane < size)


def round_rows(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Quantize x [T, size] to e4m3 with magnitudes up to `largest`; returns it with the scale of each row [T]."""
    x = x.contiguous()
    rows, size = x.shape
    numbers = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(size), 4096)
    if rows:
        _round_rows_kernel[(rows,)](
            x,
            numbers,
            scales,
            size,
            LARGEST=largest,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
            **overlapping(x.device),
        )
    return numbers, scales

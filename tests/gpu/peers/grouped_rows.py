"""Rounds rows to e4m3 with a scale per 128 columns, as DeepGEMM multiplies them, with the operation that makes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows, next_power_of_2, overlapping

GROUP = 128
LARGEST = 448.0  # of e4m3


class GroupedRows(NamedTuple):
    numbers: Tensor  # [rows, size] e4m3
    scales: Tensor  # [rows, size / 128] float32, one column after the other in memory


@triton.jit
def _round_groups_kernel(
    x_ptr,  # [rows, size]; NORM: the residual stream, changed in place if there is a delta; GATED: [rows, 2 * size]
    delta_ptr,  # [rows, size]
    numbers_ptr,
    scales_ptr,
    rows,
    size,
    eps,
    NORM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GATED:
        gate = tl.load(x_ptr + row * 2 * size + lane, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + (row * 2 + 1) * size + lane, mask=inside, other=0.0).to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate)) * up
    else:
        x = tl.load(x_ptr + row * size + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * size + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * size + lane, x.to(x_ptr.dtype.element_ty), mask=inside)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    groups = tl.reshape(x, [BLOCK // 128, 128])
    scales = tl.maximum(tl.max(tl.abs(groups), 1), 1e-10) / 448.0
    numbers = tl.reshape(groups / scales[:, None], [BLOCK])
    tl.store(numbers_ptr + row * size + lane, numbers.to(numbers_ptr.dtype.element_ty), mask=inside)
    group = tl.arange(0, BLOCK // 128)
    tl.store(scales_ptr + group * rows + row, scales, mask=group < size // 128)


def round_groups(
    x: Tensor, *, norm_eps: float | None = None, delta: Tensor | None = None, gated: bool = False
) -> GroupedRows:
    """Round x [rows, size]; with `delta` added to it in place before, normalised, or after silu(gate) * up."""
    rows, size = len(x), x.shape[1] // (2 if gated else 1)
    assert rows % 4 == 0, "DeepGEMM reads the scales of 4 rows at once"
    numbers = empty_rows(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(size // GROUP, rows, device=x.device)
    block = next_power_of_2(size)
    _round_groups_kernel[(rows,)](
        x,
        x if delta is None else delta,
        numbers,
        scales,
        rows,
        size,
        0.0 if norm_eps is None else norm_eps,
        NORM=norm_eps is not None,
        HAS_DELTA=delta is not None,
        GATED=gated,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **overlapping(x.device),
    )
    return GroupedRows(numbers, scales.T)


def round_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [out, in] with a scale per 128 x 128 elements [out / 128, in / 128]."""
    out, columns = weight.shape
    blocks = weight.float().view(out // GROUP, GROUP, columns // GROUP, GROUP)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-10) / LARGEST
    return (blocks / scales).view(out, columns).to(torch.float8_e4m3fn), scales.view(out // GROUP, columns // GROUP)

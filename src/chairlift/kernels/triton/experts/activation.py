"""The gate of experts that clamp it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping


@triton.jit
def _clamped_mul_kernel(gate_up_ptr, out_ptr, size, alpha, limit, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    product = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out_ptr + row * size + column, product.to(out_ptr.dtype.element_ty), mask=inside)


def clamped_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) [T, size] of gate_up [T, 2 * size], both clamped to the limit."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(size), 1024)
    _clamped_mul_kernel[(rows, cdiv(size, block))](
        gate_up, out, size, alpha, limit, BLOCK=block, **overlapping(gate_up.device)
    )
    return out

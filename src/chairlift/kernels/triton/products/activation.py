"""Activations: between the products of feed-forward blocks and of experts, and the soft cap of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping

ACTIVATIONS = ("silu", "gelu_tanh")  # `activated` computes these.


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """An activation of x in float32, by its name.

    The approximation of GELU by a hyperbolic tangent is x / 2 * (1 + tanh(u)), which is x * sigmoid(2 u)."""
    if ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _gated_mul_kernel(gate_up_ptr, out_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    # Round the gate before the product, as the other backends do.
    gate = activated(gate, ACTIVATION).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + column, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up [T, size] of gate_up [T, 2 * size], the gate's columns first."""
    assert activation in ACTIVATIONS
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(size), 1024)
    _gated_mul_kernel[(rows, cdiv(size, block))](
        gate_up, out, size, ACTIVATION=activation, BLOCK=block, **overlapping(gate_up.device)
    )
    return out


@triton.jit
def _softcap_kernel(logits_ptr, out_ptr, size, scale, cap, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(logits_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * size + column, (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)) * cap, mask=inside)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) [rows, size] in float32."""
    assert logits.is_contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(next_power_of_2(size), 4096)
        _softcap_kernel[(rows, cdiv(size, block))](
            logits, out, size, 1.0 / cap, cap, BLOCK=block, num_warps=8, **overlapping(logits.device)
        )
    return out


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

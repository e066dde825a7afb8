"""The gates around a recurrence."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping, row_options

_BLOCK = 1024


class NormOrder(Protocol):
    """`layers.recurrent.gated_norm.GateOrder`."""

    @property
    def norm(self) -> bool: ...

    @property
    def first(self) -> bool: ...

    @property
    def activation(self) -> str: ...

    @property
    def scale(self) -> float: ...


class RawGates(NamedTuple):
    """What decays and rates are computed from, as in `StepGate` of the layers."""

    x: Tensor  # [T, heads * width], maybe columns of a wider tensor
    rate: Tensor | None  # [T, heads], as x; None: the rate is the step
    log_rate: Tensor  # [heads] float32
    bias: Tensor  # [heads * width] float32
    limits: tuple[float, float]  # The step stays within them.

    @property
    def width(self) -> int:
        """Decays per head."""
        return len(self.bias) // len(self.log_rate)


@triton.jit
def step_of(x, bias, low, high):
    """The time step: softplus(x + bias), within limits."""
    x += bias
    step = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.minimum(tl.maximum(step, low), high)


@triton.jit
def _step_kernel(
    x_ptr,  # [T, heads * width], rows `x_stride` apart
    rate_ptr,  # [T, heads], rows `rate_stride` apart
    log_rate_ptr,  # [heads] float32
    bias_ptr,  # [heads * width] float32
    decay_ptr,  # [T, heads * width] float32
    out_ptr,  # [T, heads] float32
    x_stride,
    rate_stride,
    low,
    high,
    size,
    WIDTH: tl.constexpr,
    HAS_RATE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    head = column // WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    step = step_of(x, tl.load(bias_ptr + column, mask=inside, other=0.0), low, high)
    decay = -tl.exp(tl.load(log_rate_ptr + head, mask=inside, other=0.0)) * step
    tl.store(decay_ptr + row * size + column, decay, mask=inside)
    first = inside & (column % WIDTH == 0)
    if HAS_RATE:
        raw = tl.load(rate_ptr + row * rate_stride + head, mask=first, other=0.0).to(tl.float32)
        step = 1.0 / (1.0 + tl.exp(-raw))
    tl.store(out_ptr + row * (size // WIDTH) + head, step, mask=first)


def step_gates(gates: RawGates) -> tuple[Tensor, Tensor]:
    """decay [T, heads, width] and rate [T, heads], both float32."""
    x, rate, log_rate, bias, (low, high) = gates
    rows, heads, size = len(x), len(log_rate), len(bias)
    decay = torch.empty(rows, heads, size // heads, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
    block = min(_BLOCK, next_power_of_2(size))
    _step_kernel[(rows, cdiv(size, block))](
        x,
        x if rate is None else rate,
        log_rate,
        bias,
        decay,
        out,
        x.stride(0),
        x.stride(0) if rate is None else rate.stride(0),
        low,
        high,
        size,
        WIDTH=size // heads,
        HAS_RATE=rate is not None,
        BLOCK=block,
        num_warps=4 if block >= 512 else 1,
        **overlapping(x.device),
    )
    return decay, out


@triton.jit
def _gated_norm_kernel(
    x_ptr,  # [T, size]
    gate_ptr,  # [T, size], rows `gate_stride` apart
    weight_ptr,  # [weights] float32: size, or fewer and repeated
    out_ptr,  # [T, size]
    gate_stride,
    size,
    group,
    weights,
    eps,
    scale,
    NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < group
    column = tl.program_id(1) * group + place
    if NORM:
        weight = tl.load(weight_ptr + column % weights, mask=inside, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        factor = gate * factor
    if GATE_FIRST:
        x = x * factor
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / group + eps)
        x = x * weight
    if not GATE_FIRST:
        x = x * factor
    tl.store(out_ptr + row * size + column, (x * scale).to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, group: int, eps: float, order: NormOrder) -> Tensor:
    """x, gate [T, size] -> [T, size] of the gate's type; see `layers.recurrent.gated_norm.GatedNorm`."""
    rows, size = x.shape
    out = empty_rows(rows, size, dtype=gate.dtype, device=x.device)
    _gated_norm_kernel[(rows, size // group)](
        x,
        gate,
        x if weight is None else weight,
        out,
        gate.stride(0),
        size,
        group,
        size if weight is None else len(weight),
        eps,
        order.scale,
        NORM=weight is not None,
        GATE_FIRST=order.first,
        SILU=order.activation == "silu",
        **row_options(group, x.device),
    )
    return out

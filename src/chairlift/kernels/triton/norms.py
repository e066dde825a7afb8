"""Norms of rows, each with the additions and products around it in one pass over its data."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows, next_power_of_2, overlapping, row_options


@triton.jit
def _add_norm_kernel(
    x_ptr,  # [T, size]: the residual stream, changed in place if there is a delta
    delta_ptr,  # [T, size]
    after_ptr,  # [size]: the weight of the delta's own norm, with AFTER
    scalar_ptr,  # [1]: multiplies the sum, with SCALED
    weight_ptr,  # [size]
    out_ptr,  # [T, size], with NORMED
    size,
    x_stride,
    after_eps,
    eps,
    HAS_DELTA: tl.constexpr,
    AFTER: tl.constexpr,
    SCALED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if NORMED:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if AFTER:
        after = tl.load(after_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        scalar = tl.load(scalar_ptr).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:  # rounded as separate kernels would
        delta = tl.load(delta_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            delta *= tl.rsqrt(tl.sum(delta * delta, 0) / size + after_eps) * after
            delta = delta.to(kind).to(tl.float32)
        x = (x + delta).to(kind).to(tl.float32)
        if SCALED:
            x = (x * scalar).to(kind).to(tl.float32)
        tl.store(x_ptr + row * x_stride + column, x.to(kind), mask=inside)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        tl.store(out_ptr + row * size + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [T, size], whose rows may lie within longer ones."""
    out = empty_rows(*x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, eps, out)
    return out


def add_rms_norm_(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    after: Tensor | None = None,
    after_eps: float = 0.0,
    scalar: Tensor | None = None,
) -> Tensor:
    """Add `delta` to the residual stream `x` in place and return the norm of the sum, or `x` itself without `weight`.

    `after` [size]: the weight of a norm of `delta` itself. `scalar` [1]: multiplies the sum.
    """
    out = x if weight is None else empty_rows(*x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, delta, weight, eps, out, after, after_eps, scalar)
    return out


def _launch_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    after: Tensor | None = None,
    after_eps: float = 0.0,
    scalar: Tensor | None = None,
) -> None:
    assert x.stride(1) == 1
    assert delta is None or delta.is_contiguous()
    size = x.shape[1]
    _add_norm_kernel[(len(x),)](
        x,
        x if delta is None else delta,
        x if after is None else after,
        x if scalar is None else scalar,
        x if weight is None else weight,
        out,
        size,
        x.stride(0),
        after_eps,
        eps,
        HAS_DELTA=delta is not None,
        AFTER=after is not None,
        SCALED=scalar is not None,
        NORMED=weight is not None,
        **row_options(size, x.device),
    )


@triton.jit
def _norm_parts_kernel(
    x_ptr,  # [T, stride]: columns 0 .. first - 1 and first .. first + second - 1 are normalised by themselves
    first_weight_ptr,  # [first]
    second_weight_ptr,  # [second]
    first,
    second,
    stride,
    eps,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_second = tl.program_id(1) == 1
    size = tl.where(is_second, second, first)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(first_weight_ptr + column, mask=inside & (is_second == 0), other=0.0).to(tl.float32)
    weight += tl.load(second_weight_ptr + column, mask=inside & is_second, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = x_ptr + row * stride + tl.where(is_second, first, 0) + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=inside)


def norm_parts_(x: Tensor, first: Tensor, second: Tensor, eps: float) -> None:
    """Normalise the first columns of x [T, size] in place, as many as `first` has weights, and those behind them, as
    many as `second` has, by themselves."""
    assert x.is_contiguous()
    _norm_parts_kernel[(len(x), 2)](
        x,
        first,
        second,
        len(first),
        len(second),
        x.shape[1],
        eps,
        **row_options(max(len(first), len(second)), x.device),
    )


@triton.jit
def _per_layer_inputs_kernel(
    tokens_ptr,  # [T] int32 or int64
    table_ptr,  # [vocab, layers * size]
    projected_ptr,  # [T, layers * size]: replaced by the result
    weight_ptr,  # [size]
    size,
    projected_scale,
    stored_scale,
    scale,
    eps,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens_ptr + row).to(tl.int64)
    width = tl.num_programs(1) * size
    first = tl.program_id(1) * size
    kind: tl.constexpr = projected_ptr.dtype.element_ty
    stored = tl.load(table_ptr + token * width + first + column, mask=inside, other=0.0).to(tl.float32)
    at = projected_ptr + row * width + first + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * projected_scale
    x = x.to(kind).to(tl.float32)  # rounded as separate kernels would
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight).to(kind).to(tl.float32)
    x = (x + stored * stored_scale).to(kind).to(tl.float32)
    tl.store(at, (x * scale).to(kind), mask=inside)


def per_layer_inputs_(
    tokens: Tensor,
    table: Tensor,
    projected: Tensor,
    weight: Tensor,
    eps: float,
    *,
    projected_scale: float,
    stored_scale: float,
    scale: float,
) -> None:
    """projected = scale * (norm(projected_scale * projected) + stored_scale * table[tokens]), in place.

    table [vocab, layers * size], projected [T, layers * size]; the norm is that of each layer's `size` columns.
    """
    assert projected.is_contiguous()
    size = len(weight)
    block = next_power_of_2(size)
    _per_layer_inputs_kernel[(len(tokens), table.shape[1] // size)](
        tokens,
        table,
        projected,
        weight,
        size,
        projected_scale,
        stored_scale,
        scale,
        eps,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
        **overlapping(projected.device),
    )

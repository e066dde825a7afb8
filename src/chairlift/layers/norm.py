"""Normalisation of rows: by their root mean square, or to zero mean and unit variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.linear import Build
from chairlift.layers.parts import Part, Targets
from chairlift.layers.rows import row_by_row


class Norm(Part):
    """A normalisation of each row, then a learned weight and perhaps a bias.

    With `unit_offset` the checkpoint stores the weight minus one (Gemma), and the product is computed in float32 before
    rounding.
    """

    centers: ClassVar[bool]  # rows are shifted to zero mean

    def __init__(
        self, size: int | tuple[int, int], eps: float, build: Build, *, unit_offset: bool = False, bias: bool = False
    ) -> None:
        dtype = torch.float32 if unit_offset else build.dtype
        self.weight = torch.empty(size, dtype=dtype, device=build.device)
        self.bias = torch.empty_like(self.weight) if bias else None
        self.eps = eps
        self.unit_offset = unit_offset

    def targets(self, name: str) -> Targets:
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def finalize(self) -> None:
        if self.unit_offset:
            self.weight += 1.0

    def move_weight(self, scale_columns: Callable[[Tensor], bool]) -> bool:
        """Make the weight part of the matrix that follows, if that is possible. Called before `finalize`."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class RMSNorm(Norm):
    """Scales each row to unit mean square; the mean is computed in float32."""

    centers = False

    def move_weight(self, scale_columns: Callable[[Tensor], bool]) -> bool:
        if not scale_columns(self.weight + 1.0 if self.unit_offset else self.weight):
            return False
        self.weight.fill_(0.0 if self.unit_offset else 1.0)
        return True

    def __call__(self, x: Tensor) -> Tensor:
        if on_gpu(x.device) and x.dim() == 2:
            from chairlift.kernels.triton.norms import rms_norm

            return rms_norm(x, self.weight, self.eps)
        rows = x.to(self.weight.dtype)
        return row_by_row(lambda part: F.rms_norm(part, self.weight.shape, self.weight, self.eps), rows).to(x.dtype)


class LayerNorm(Norm):
    """Shifts each row to zero mean and scales it to unit variance.

    With two sizes (heads, size), every head has a weight of its own. Kernels whose matrix holds the weight do not
    subtract the mean, so that it cannot be moved there.
    """

    centers = True

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self.weight.dtype)
        if self.weight.dim() == 1:
            return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)
        normed = F.layer_norm(rows, rows.shape[-1:], eps=self.eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)


def add_normed_(
    x: Tensor, delta: Tensor, norm: Norm | None, *, after: Norm | None = None, scalar: Tensor | None = None
) -> Tensor:
    """(x + after(delta)) * scalar, in place of the residual stream `x` [T, size]; returns its norm, or without one `x`.

    `after`: a norm of what is added. `scalar` [1]: a factor of the sum.
    """
    norms = [each for each in (after, norm) if each is not None]
    if norms and on_gpu(x.device) and not any(each.centers for each in norms):
        from chairlift.kernels.triton.norms import add_rms_norm_

        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        own: dict[str, Any] = {} if after is None else {"after": after.weight, "after_eps": after.eps}
        return add_rms_norm_(x, delta, weight, eps, **own, scalar=scalar)
    x.add_(delta if after is None else after(delta))
    if scalar is not None:
        x.mul_(scalar)
    return x if norm is None else norm(x)

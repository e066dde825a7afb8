"""Weights and activations in 8-bit floats (e4m3: four bits of exponent, three of mantissa), on GPUs that multiply them.

Every output channel of a weight has a scale, computed once; every row of activations has one, computed at every step,
so that no request's numbers depend on another's. Products are added in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chairlift.kernels.gpu import capability_of, on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3


class ScaledRows(NamedTuple):
    """A matrix in 8-bit floats with one scale per row."""

    numbers: Tensor  # [rows, size] e4m3
    scales: Tensor  # [rows] float32: a row is its numbers times its scale

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


@FORMATS.register("fp8")
class FP8Weight(WeightFormat):
    name = "fp8"
    stores_head = False

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._rows: ScaledRows | None = None

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        found = fp8_obstacles(device)
        if dtype not in (torch.bfloat16, torch.float16):
            found.append(f"activations are bfloat16 or float16 with it, not {dtype}")
        return found

    def pack(self) -> None:
        if self.plain is not None:
            self._rows = round_rows(self.plain)
            self.plain = None

    @property
    def num_bytes(self) -> int:
        assert self._rows is not None
        return self._rows.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._rows is not None
        return multiply(x, self._rows, bias, own_kernel=self.batch_invariant)


def fp8_obstacles(device: torch.device) -> list[str]:
    """Why 8-bit floats cannot be used there; empty if they can."""
    if not on_gpu(device):
        return [f"8-bit floats are for GPUs, not for the {device.type}"]
    major, minor = capability_of(device)
    if (major, minor) < (8, 9):
        return [f"8-bit floats need a GPU of compute capability 8.9 or later, this one has {major}.{minor}"]
    return []


def round_rows(x: Tensor) -> ScaledRows:
    """Scale each row so that its largest number is the largest of e4m3, and round it."""
    if on_gpu(x.device):
        from chairlift.kernels.triton.fp8 import round_rows as round_on_gpu

        return ScaledRows(*round_on_gpu(x, LARGEST))
    wide = x.float()
    scales = wide.abs().amax(dim=1) / LARGEST
    factors = torch.where(scales > 0, 1.0 / scales, torch.zeros_like(scales))
    return ScaledRows((wide * factors[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scales)


def multiply(x: Tensor, weight: ScaledRows, bias: Tensor | None, *, own_kernel: bool) -> Tensor:
    """x [T, depth] times weight [channels, depth] transposed, plus bias, in the type of x.

    torch's product with a scale per row and channel needs sizes that are multiples of 16, and returns bfloat16; our own
    kernel does the others. With `own_kernel` it does all of them: its sums do not depend on the number of rows.
    """
    rows = round_rows(x)
    channels, depth = weight.numbers.shape
    if not own_kernel and x.dtype is torch.bfloat16 and channels % 16 == 0 and depth % 16 == 0 and len(x):
        return torch._scaled_mm(
            rows.numbers,
            weight.numbers.t(),
            scale_a=rows.scales[:, None],
            scale_b=weight.scales[None, :],
            bias=bias,
            out_dtype=x.dtype,
        )
    from chairlift.kernels.triton.invariant import invariant_linear

    return invariant_linear(rows.numbers, weight.numbers, bias, scales=(rows.scales, weight.scales), out_dtype=x.dtype)

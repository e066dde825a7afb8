"""Weights and activations in 8-bit floats (e4m3: four bits of exponent, three of mantissa), on GPUs that multiply them.

Every output channel of a weight has a scale, computed once; every row of activations has one, computed at every step,
so that no request's numbers depend on another's. Products are added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.kernels.gpu import capability_of, on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ScaledRows, WeightFormat
from chairlift.loading.stored_weight import ScaledFloats, StoredWeight

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
FEW_ROWS = 32  # up to which reading the weights takes so long that the activations need not be rounded
MANY_ROWS = 256  # from which cuBLAS is faster than our products


@FORMATS.register("fp8")
class FP8Weight(WeightFormat):
    name = "fp8"
    stores_head = False
    stores_experts = rounds_experts = True
    devices = ("cuda",)
    most_fused_rows = FEW_ROWS
    rounds_rows = True

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._rows: ScaledRows | None = None

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        found = fp8_obstacles(device)
        if dtype not in (torch.bfloat16, torch.float16):
            found.append(f"activations are bfloat16 or float16 with it, not {dtype}")
        return found

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        return out_features * (in_features + 4)  # a scale for each output channel

    @classmethod
    def accepts(cls, parts: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> bool:
        floats = all(isinstance(part, ScaledFloats) and part.numbers.dtype is FP8 for part in parts)
        return floats and not cls.obstacles(dtype, device)

    def load(self, parts: Sequence[StoredWeight]) -> None:
        """Scales per tensor and per channel are kept; weights with scales per block are rounded again, per channel."""
        found = []
        for part in parts:
            assert isinstance(part, ScaledFloats)
            scales = part.row_scales
            if scales is None:
                found.append(round_rows(part.dequantized().to(self.device)))
            else:
                found.append(ScaledRows(part.numbers.to(self.device), scales.to(self.device)))
        numbers = torch.cat([rows.numbers.view(torch.uint8) for rows in found]).view(FP8)
        self._rows = ScaledRows(numbers, torch.cat([rows.scales for rows in found]))
        self.plain = None

    def pack(self) -> None:
        if self.plain is not None:
            if self.plain.is_meta:  # a GPU that is only described: there is nothing to round
                numbers = torch.empty_like(self.plain, dtype=FP8)
                self._rows = ScaledRows(numbers, self.plain.new_empty(self.out_features, dtype=torch.float32))
            else:
                self._rows = round_rows(self.plain)
            self.plain = None

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None] | None:
        return super().row_major if self._rows is None else (self._rows.numbers, self._rows.scales)

    def dequantized(self) -> Tensor:
        """The weight as it was rounded, in float32."""
        assert self._rows is not None
        return self._rows.numbers.float() * self._rows.scales[:, None]

    @property
    def num_bytes(self) -> int:
        assert self._rows is not None
        return self._rows.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._rows is not None
        few = on_gpu(x.device) and not self.batch_invariant and len(x) <= FEW_ROWS
        if few and self.in_features % 16 == 0 and self.fuses_rows(len(x), gated=False):
            return self.fused(x.contiguous(), bias=bias)[0]
        return multiply(round_rows(x), self._rows, bias, x.dtype, own_kernel=self.batch_invariant)

    def fuses_rows(self, rows: int, *, gated: bool) -> bool:
        from chairlift.kernels.triton.launch import tuned

        return tuned()

    def fused(
        self,
        x: Tensor,
        *,
        squares: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if len(x) > 1:
            return self._product(x, squares=squares, eps=eps, bias=bias, gated=gated, add_to=add_to)
        from chairlift.kernels.triton.vector import vector_product

        assert self._rows is not None
        numbers, scales = self._rows
        return vector_product(x, numbers, scales, squares=squares, eps=eps, bias=bias, gated=gated, add_to=add_to)

    def splits_rows(self, rows: int) -> bool:
        """On Hopper and later, whose tensor cores multiply e4m3 with e5m2."""
        from chairlift.kernels.triton.launch import reads_ahead

        return rows > 1 and self.fuses_rows(rows, gated=True) and reads_ahead(self.device)

    def fused_split(
        self,
        x: Tensor,
        *,
        squares: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        from chairlift.kernels.triton.fp8 import PAIR, empty_pairs

        rows = len(x) // 2 if x.dtype is PAIR else len(x)
        pairs = empty_pairs(rows, self.out_features // (2 if gated else 1), x.device)
        _, squares_out = self._product(
            x, squares=squares, eps=eps, bias=bias, gated=gated, add_to=add_to, pairs_out=pairs
        )
        return pairs, squares_out

    def _product(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        from chairlift.kernels.triton.products.product import product

        assert self._rows is not None
        return product(x, self._rows.numbers, weight_scales=self._rows.scales, out_dtype=self.dtype, **options)

    def adds_rounded(self, rows: int) -> bool:
        return rows <= MANY_ROWS and self.fuses_rows(rows, gated=False)

    def multiply_rounded(
        self, rows: ScaledRows, bias: Tensor | None, *, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor | ScaledRows:
        assert self._rows is not None
        if self.adds_rounded(len(rows.numbers)):
            found, _ = self._product(rows.numbers, x_scales=rows.scales, bias=bias, gated=gated, add_to=add_to)
            return round_rows(found) if gated else found
        assert add_to is None
        found = multiply(rows, self._rows, bias, self.dtype, own_kernel=False)
        return silu_mul_rounded(found) if gated else found


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


def norm_rounded(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> ScaledRows:
    """Add `delta` to the residual stream `x` in place; return the norm of the sum, rounded. On a GPU."""
    from chairlift.kernels.triton.fp8 import norm_rounded as norm_rounded_on_gpu

    return ScaledRows(*norm_rounded_on_gpu(x, delta, weight, eps, LARGEST))


def silu_mul_rounded(gate_up: Tensor) -> ScaledRows:
    """silu(gate) * up of gate_up [T, 2 * size], the gate's columns first, rounded. On a GPU."""
    from chairlift.kernels.triton.fp8 import silu_mul_rounded as gated_on_gpu

    return ScaledRows(*gated_on_gpu(gate_up, LARGEST))


def multiply(
    rows: ScaledRows, weight: ScaledRows, bias: Tensor | None, dtype: torch.dtype, *, own_kernel: bool
) -> Tensor:
    """rows [T, depth] times weight [channels, depth] transposed, plus bias, in `dtype`.

    torch's product with a scale per row and channel needs sizes that are multiples of 16, and returns bfloat16; our own
    kernel does the others. With `own_kernel` it does all of them: its sums do not depend on the number of rows.
    """
    channels, depth = weight.numbers.shape
    if not own_kernel and dtype is torch.bfloat16 and channels % 16 == 0 and depth % 16 == 0 and len(rows.numbers):
        return torch._scaled_mm(
            rows.numbers,
            weight.numbers.t(),
            scale_a=rows.scales[:, None],
            scale_b=weight.scales[None, :],
            bias=bias,
            out_dtype=dtype,
            # Sums stay in the tensor cores, as in our products of fewer rows: up to 12% faster on an H200. Experts and
            # batch-invariant products add them up in float32.
            use_fast_accum=True,
        )
    from chairlift.kernels.triton.invariant import invariant_linear

    return invariant_linear(rows.numbers, weight.numbers, bias, scales=(rows.scales, weight.scales), out_dtype=dtype)

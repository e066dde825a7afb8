"""Weights and activations in 8-bit floats (e4m3: four bits of exponent, three of mantissa), on GPUs that multiply them.

Every output channel of a weight has a scale, computed once; every row of activations has one, computed at every step,
so that no request's numbers depend on another's. Products are added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chairlift.kernels.gpu import capability_of, on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ALONE, FormatTraits, Fusion, FusionPart, Product, WeightFormat
from chairlift.loading.stored_weight import ScaledFloats, StoredWeight

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
FEW_ROWS = 32  # Reading the weights takes so long up to here that activations need not be rounded.
MANY_ROWS = 256  # cuBLAS is faster than our products from here on.


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
    traits = FormatTraits(
        stores_head=False,
        stores_experts=True,
        rounds_experts=True,
        devices=("cuda",),
        fuses={"norm": FEW_ROWS, "norm and gate": FEW_ROWS, "pairs": FEW_ROWS, "rounded add": MANY_ROWS},
    )

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._rows: ScaledRows | None = None

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        obstacles = fp8_obstacles(device)
        if dtype not in (torch.bfloat16, torch.float16):
            obstacles.append(f"activations are bfloat16 or float16 with it, not {dtype}")
        return obstacles

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        return out_features * (in_features + 4)  # a scale for each output channel

    @classmethod
    def accepts(cls, parts: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> bool:
        floats = all(isinstance(part, ScaledFloats) and part.numbers.dtype is FP8 for part in parts)
        return floats and not cls.obstacles(dtype, device)

    def load(self, parts: Sequence[StoredWeight]) -> None:
        """Scales per tensor and per channel are kept; weights with scales per block are rounded again, per channel."""
        all_rows = []
        for part in parts:
            assert isinstance(part, ScaledFloats)
            scales = part.row_scales
            if scales is None:
                all_rows.append(round_rows(part.dequantized().to(self.device)))
            else:
                all_rows.append(ScaledRows(part.numbers.to(self.device), scales.to(self.device)))
        numbers = torch.cat([rows.numbers.view(torch.uint8) for rows in all_rows]).view(FP8)
        self._rows = ScaledRows(numbers, torch.cat([rows.scales for rows in all_rows]))
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

    def fuses(self, part: FusionPart, rows: int) -> bool:
        if part == "pairs":  # Tensor cores multiply e4m3 with e5m2 on Hopper and later.
            from chairlift.kernels.triton.launch import reads_ahead

            if not (rows > 1 and reads_ahead(self.device)):
                return False
        return super().fuses(part, rows)

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        assert self._rows is not None
        if fusion.scales is not None:
            return self._product_of_rounded(ScaledRows(x, fusion.scales), fusion)
        if fusion.pairs:
            return self._product_in_pairs(x, fusion)
        few = on_gpu(x.device) and not self.batch_invariant and self.in_features % 16 == 0
        if not fusion.is_alone or (few and len(x) <= FEW_ROWS and super().fuses("norm", 1)):
            return self._product(x.contiguous(), fusion)  # The activations are not rounded.
        own = self.batch_invariant
        return Product(multiply(round_rows(x), self._rows, fusion.bias, x.dtype, own_kernel=own))

    def _product_in_pairs(self, x: Tensor, fusion: Fusion) -> Product:
        from chairlift.kernels.triton.fp8 import PAIR, empty_pairs

        rows = len(x) // 2 if x.dtype is PAIR else len(x)
        pairs = empty_pairs(rows, self.out_features // (2 if fusion.gated else 1), x.device)
        return Product(pairs, self._product(x, fusion, pairs_out=pairs).squares)

    def _product_of_rounded(self, rows: ScaledRows, fusion: Fusion) -> Product:
        assert self._rows is not None
        if self.fuses("rounded add", len(rows.numbers)):
            result = self._product(rows.numbers, fusion, x_scales=rows.scales)
            if not fusion.gated:
                return result
            gated = round_rows(result.rows)
        else:
            assert fusion.add_to is None
            product = multiply(rows, self._rows, fusion.bias, self.dtype, own_kernel=False)
            if not fusion.gated:
                return Product(product)
            from chairlift.kernels.triton.fp8 import silu_mul_rounded

            gated = ScaledRows(*silu_mul_rounded(product, LARGEST))
        return Product(gated.numbers, scales=gated.scales)

    def _product(self, x: Tensor, fusion: Fusion, **options: Any) -> Product:
        assert self._rows is not None
        if len(x) == 1 and not options:
            from chairlift.kernels.triton.vector import vector_product

            around: dict[str, Any] = {"squares": fusion.squares, "eps": fusion.eps, "add_to": fusion.add_to}
            return Product(*vector_product(x, *self._rows, bias=fusion.bias, gated=fusion.gated, **around))
        from chairlift.kernels.triton.products.product import product

        options |= {"squares": fusion.squares, "eps": fusion.eps, "bias": fusion.bias, "add_to": fusion.add_to}
        weight, scales = self._rows
        return Product(*product(x, weight, weight_scales=scales, out_dtype=self.dtype, gated=fusion.gated, **options))


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
    from chairlift.kernels.triton.products.invariant import invariant_linear

    return invariant_linear(rows.numbers, weight.numbers, bias, scales=(rows.scales, weight.scales), out_dtype=dtype)

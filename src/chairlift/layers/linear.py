"""A linear map that is stored in the layout the machine multiplies fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.rows import in_tiles

if TYPE_CHECKING:  # numba takes its time
    from chairlift.kernels.cpu.int8 import PackedWeight
    from chairlift.layers.fp8 import ScaledRows

# oneDNN chooses the packed layout for an expected number of rows. Decode steps have some tens of rows; a
# layout chosen for 32 is within noise of the best one measured at 1, 8, 32 and 512 rows.
EXPECTED_ROWS = 32


class Linear:
    """`y = x Wᵀ + b`: made empty, filled from a checkpoint, then finalized.

    `shared` says that someone else also reads the weight (a tied language-model head and its embedding table).
    Packing then leaves the plain copy in place, so on CPU a tied head costs its bytes twice: lookups need
    plain rows, and the head is the largest matrix product of a decode step.
    """

    batch_invariant = False  # every row comes out the same, bit for bit, however many others there are

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._packed: Tensor | None = None
        self._rounded: PackedWeight | ScaledRows | None = None  # to 8 bits
        own_weight = can_pack(weight) or not shared
        self._weight_bytes = weight.nbytes if own_weight else 0

    @property
    def num_bytes(self) -> int:
        weight = self._weight_bytes if self._rounded is None else self._rounded.nbytes
        return weight + (0 if self.bias is None else self.bias.nbytes)

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    def finalize(self) -> None:
        """Call once the weight is filled: packs it where that pays, and lets go of the plain copy."""
        if self._rounded is None and self.weight is not None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, EXPECTED_ROWS)
            self.weight = None

    def round(self, place: PackedWeight | None = None) -> None:
        """Instead of `finalize`: keep the weight in 8 bits (in `place`), and let go of the plain copy. CPU only."""
        from chairlift.kernels.cpu.int8 import PackedWeight

        assert self.weight is not None
        self._rounded = place or PackedWeight.empty(1, self.out_features, self.in_features).layer(0)
        self._rounded.fill(self.weight.float().numpy())
        self.weight = None

    def round_to_floats(self) -> None:
        """Instead of `finalize`: keep the weight in 8-bit floats, and let go of the plain copy."""
        from chairlift.layers.fp8 import round_rows

        assert self.weight is not None
        self._rounded = round_rows(self.weight)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # a step that samples nothing asks the head; neither oneDNN nor tensor descriptors take no rows
            return x.new_empty(0, self.out_features)
        if self._rounded is not None:
            return self._multiply_rounded(x, self._rounded)
        if not self.batch_invariant:
            return self._multiply(x)
        return self._multiply_on_gpu(x) if x.is_cuda else in_tiles(self._multiply, x)

    def _multiply_rounded(self, x: Tensor, weight: PackedWeight | ScaledRows) -> Tensor:
        from chairlift.layers.fp8 import ScaledRows, multiply

        if isinstance(weight, ScaledRows):
            return multiply(x, weight, self.bias, own_kernel=self.batch_invariant)
        from chairlift.kernels.cpu.decoder import rounded_linear

        return rounded_linear(x, weight, self.bias, self.out_features)

    def _multiply_on_gpu(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        from chairlift.kernels.triton.invariant import invariant_linear
        from chairlift.kernels.triton.products import product

        assert self.weight is not None
        if self.batch_invariant:
            return invariant_linear(x, self.weight, self.bias, add_to=add_to)
        return product(x, self.weight, add_to=add_to)[0]

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self.weight is not None
            return self._multiply_on_gpu(x) if self.adds_in_place(x) else F.linear(x, self.weight, self.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return output

    def adds_in_place(self, x: Tensor) -> bool:
        """Whether our own kernel does the product with `x`, so that adding it to something costs nothing more."""
        if not x.is_cuda or self.bias is not None or self.weight is None:
            return False
        if self.batch_invariant:
            return True
        if x.dtype not in (torch.bfloat16, torch.float16) or self.in_features % 16 != 0:
            return False
        from chairlift.kernels.triton.products import is_faster

        return is_faster(len(x), self.out_features, self.in_features, gated=False)

    def add_to_(self, total: Tensor, x: Tensor) -> None:
        """total [T, out_features] += x Wᵀ, where `adds_in_place` allows it."""
        self._multiply_on_gpu(x, add_to=total)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight prepacked and multiply with it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32

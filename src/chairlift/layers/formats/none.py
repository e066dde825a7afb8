"""Weights in the model's own type, in the layout that the machine multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.rows import in_tiles

# oneDNN chooses the packed layout for an expected number of rows. Decode steps have some tens of rows; a
# layout chosen for 32 is within noise of the best one measured at 1, 8, 32 and 512 rows.
EXPECTED_ROWS = 32


@FORMATS.register("none")
class PlainWeight(WeightFormat):
    """On a CPU the weight is prepacked by oneDNN, which replaces the plain tensor.

    A shared tensor stays, so a tied head on a CPU takes its bytes twice: lookups need plain rows, and the head is the
    largest matrix product of a decode step.
    """

    name = "none"
    stores_experts = True
    keeps_plain = True

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._num_bytes = weight.nbytes
        self._borrowed = shared and not can_pack(weight)
        self._packed: Tensor | None = None

    def pack(self) -> None:
        if self.plain is not None and can_pack(self.plain):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, EXPECTED_ROWS)
            self.plain = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def own_bytes(self) -> int:
        return 0 if self._borrowed else self._num_bytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.batch_invariant and not x.is_cuda:
            return in_tiles(lambda rows: self._multiply(rows, bias), x)
        return self._multiply(x, bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
            return output
        assert self.plain is not None
        if x.is_cuda and self.batch_invariant:
            from chairlift.kernels.triton.invariant import invariant_linear

            return invariant_linear(x, self.plain, bias)
        if bias is None and self.adds_in_place(x):
            return self._multiply_by_kernel(x)
        return F.linear(x, self.plain, bias)

    def adds_in_place(self, x: Tensor) -> bool:
        if not x.is_cuda or self.plain is None:
            return False
        if self.batch_invariant:
            return True
        if x.dtype not in (torch.bfloat16, torch.float16) or self.in_features % 16 != 0:
            return False
        from chairlift.kernels.triton.products import is_faster

        return is_faster(len(x), self.out_features, self.in_features, gated=False)

    def add_to_(self, total: Tensor, x: Tensor) -> None:
        self._multiply_by_kernel(x, add_to=total)

    def _multiply_by_kernel(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        from chairlift.kernels.triton.invariant import invariant_linear
        from chairlift.kernels.triton.products import product

        assert self.plain is not None
        if self.batch_invariant:
            return invariant_linear(x, self.plain, None, add_to=add_to)
        return product(x, self.plain, add_to=add_to)[0]


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight prepacked and multiply with it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32

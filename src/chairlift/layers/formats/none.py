"""No quantization: weights in the model's own type, in the layout that the machine multiplies fastest."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.rows import in_tiles

# oneDNN chooses the packed layout for an expected number of rows. Decode steps have some tens of rows; a
# layout chosen for 32 is within noise of the best one measured at 1, 8, 32 and 512 rows.
EXPECTED_ROWS = 32


@FORMATS.register("none")
class PlainWeight(WeightFormat):
    """An unquantized weight: on a GPU as it was loaded, on a CPU prepacked by oneDNN, which replaces the plain tensor.

    A shared tensor is not released, so a tied head on a CPU takes its bytes twice: lookups need plain rows, and the
    head is the largest matrix product of a decode step.
    """

    name = "none"
    stores_experts = True
    fuses_invariantly = True
    most_fused_rows = 256  # with more rows the products take so long that fusing what is between them gains little

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._num_bytes = weight.nbytes
        self._counted_elsewhere = shared and not can_pack(weight)  # no copy is made: the embedding counts the bytes
        self._packed: Tensor | None = None

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Allocated at once: a model that does not fit into memory fails before its files are read."""
        return cls(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def pack(self) -> None:
        if self.batch_invariant and self.plain is not None and self._has_own_kernel(self.plain):
            from chairlift.kernels.triton.products.invariant import tiles_agree

            tiles_agree(self.dtype, self.plain.device)  # tried before steps are recorded or captured
        if self.plain is not None and can_pack(self.plain) and not self.looked_up:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, EXPECTED_ROWS)
            self.plain = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def own_bytes(self) -> int:
        return 0 if self._counted_elsewhere else self._num_bytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if on_gpu(x.device):
            return self._multiply_on_gpu(x, bias)
        if self.batch_invariant:
            return in_tiles(lambda rows: self._multiply_on_cpu(rows, bias), x)
        return self._multiply_on_cpu(x, bias)

    def _multiply_on_cpu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is None:
            assert self.plain is not None
            return F.linear(x, self.plain, bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return output

    def _multiply_on_gpu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.plain is not None
        if self.batch_invariant:
            return self._multiply_invariantly(x, bias=bias)
        if self._own_kernel_is_faster(x):
            from chairlift.kernels.triton.products.product import product

            return product(x, self.plain, bias=bias)[0]
        return F.linear(x, self.plain, bias)

    def _multiply_invariantly(self, x: Tensor, *, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        assert self.plain is not None
        if self._has_own_kernel(x):
            from chairlift.kernels.triton.products.product import product

            return product(x.contiguous(), self.plain, bias=bias, add_to=add_to, invariant=True)[0]
        from chairlift.kernels.triton.invariant import invariant_linear

        return invariant_linear(x, self.plain, bias, add_to=add_to)

    def adds_in_place(self, x: Tensor) -> bool:
        return on_gpu(x.device) and (self.batch_invariant or self._own_kernel_is_faster(x))

    def sums_squares(self, x: Tensor) -> bool:
        return not self.batch_invariant and self._own_kernel_is_faster(x)

    def gates_in_place(self, x: Tensor) -> bool:
        return self._has_own_kernel(x) and self.fuses_rows(len(x), gated=True)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        from chairlift.kernels.triton.products.product import product

        assert self.plain is not None
        return product(x, self.plain, gated=True, activation=activation, invariant=self.batch_invariant)[0]

    def activates_in_place(self, x: Tensor) -> bool:
        return self._own_kernel_is_faster(x)

    def activated(self, x: Tensor, activation: str, times: Tensor) -> Tensor:
        from chairlift.kernels.triton.products.product import product

        assert self.plain is not None
        return product(x, self.plain, activation=activation, times=times, invariant=self.batch_invariant)[0]

    def add_to_(self, total: Tensor, x: Tensor) -> None:
        assert self.plain is not None
        if self.batch_invariant:
            self._multiply_invariantly(x, add_to=total)
        else:
            from chairlift.kernels.triton.products.product import product

            product(x, self.plain, add_to=total)

    def fuses_rows(self, rows: int, *, gated: bool) -> bool:
        from chairlift.kernels.triton.products.tiling import is_faster

        if self.batch_invariant:  # there is one order of sums
            return True
        return is_faster(rows, self.out_features // (2 if gated else 1), self.in_features, gated)

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
        from chairlift.kernels.triton.products.product import product

        assert self.plain is not None
        what: dict[str, Any] = {"squares": squares, "eps": eps, "bias": bias, "gated": gated, "add_to": add_to}
        return product(x, self.plain, **what, invariant=self.batch_invariant)

    def _own_kernel_is_faster(self, x: Tensor) -> bool:
        """Whether our Triton product is faster than torch's for `rows` rows."""
        return self._has_own_kernel(x) and self.fuses_rows(len(x), gated=False)

    def _has_own_kernel(self, x: Tensor) -> bool:
        return on_gpu(x.device) and x.dtype in (torch.bfloat16, torch.float16) and self.in_features % 16 == 0


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight prepacked and multiply with it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32

"""No quantization: weights in the model's own type, in the layout that the machine multiplies fastest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ALONE, FormatTraits, Fusion, FusionPart, Product, WeightFormat
from chairlift.layers.rows import in_tiles

# oneDNN chooses the packed layout for an expected number of rows. Decode steps have some tens of rows; a
# layout chosen for 32 is within noise of the best one measured at 1, 8, 32 and 512 rows.
EXPECTED_ROWS = 32
FASTER_UP_TO = (64, 96, 128, 224, 256)  # the numbers of rows up to which our products may be faster, by their shape


COMPARED_ROWS = (2, 3, 7, 16, 33, 64, 200)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Whether oneDNN computes a row with the same bits beside other rows. It is found by trying."""

    single: bool = True  # a row alone
    several: bool = True  # any number of rows from two on


_row_orders: dict[tuple[int, int, int], RowOrder] = {}  # The keys are output features, input features and threads.


@FORMATS.register("none")
class PlainWeight(WeightFormat):
    """An unquantized weight: on a GPU as it was loaded, on a CPU prepacked by oneDNN, which replaces the plain tensor.

    A shared tensor is not released, so a tied head on a CPU takes its bytes twice: lookups need plain rows, and the
    head is the largest matrix product of a decode step.
    """

    name = "none"
    # With more rows the products take so long that fusing what is between them gains little.
    traits = FormatTraits(stores_experts=True, fuses={"norm": 256, "norm and gate": 256}, fuses_invariantly=True)

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._num_bytes = weight.nbytes
        self._counted_elsewhere = shared and not can_pack(weight)  # no copy is made: the embedding counts the bytes
        self._packed: Tensor | None = None
        self.row_order = RowOrder()

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Allocated at once: a model that does not fit into memory fails before its files are read."""
        return cls(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def pack(self) -> None:
        if self.batch_invariant and self.plain is not None and self._has_own_kernel:
            from chairlift.kernels.triton.products.tiling import tiles_agree

            tiles_agree(self.dtype, self.plain.device)  # tried before steps are recorded or captured
        if self.plain is not None and can_pack(self.plain) and not self.looked_up:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, EXPECTED_ROWS)
            self.plain = None
            if self.dtype is torch.float32:
                self.row_order = self._find_row_order()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def keeps_row_bits(self) -> bool:
        return self.row_order.several and self._packed is not None and self.dtype is torch.float32

    @property
    def own_bytes(self) -> int:
        return 0 if self._counted_elsewhere else self._num_bytes

    def fuses(self, part: FusionPart, rows: int) -> bool:
        from chairlift.kernels.triton.launch import tuned

        in_whole_layers = part in self.traits.fuses
        if not in_whole_layers and not self._has_own_kernel:
            return part == "add" and self.batch_invariant and on_gpu(self.device)
        if self.batch_invariant:  # there is one order of sums
            return in_whole_layers or part in ("add", "gate", "activation")
        if part in ("pairs", "rounded add"):
            return False
        return tuned() and rows <= self._most_rows[part in ("norm and gate", "gate")]

    @cached_property
    def _most_rows(self) -> tuple[int, int]:
        """Up to how many rows our kernel is faster than torch's, without and with a gate."""
        from chairlift.kernels.triton.products.tiling import is_faster

        def most(columns: int, *, gated: bool) -> int:
            fast = (rows for rows in FASTER_UP_TO if is_faster(rows, columns, self.in_features, gated))
            return max(fast, default=0)

        return most(self.out_features, gated=False), most(self.out_features // 2, gated=True)

    @property
    def _has_own_kernel(self) -> bool:
        return on_gpu(self.device) and self.dtype in (torch.bfloat16, torch.float16) and self.in_features % 16 == 0

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        if not fusion.is_alone or (on_gpu(x.device) and (self.batch_invariant or self.fuses("add", len(x)))):
            return self._product_in_kernel(x, fusion)
        if self.batch_invariant and not on_gpu(x.device):
            return Product(in_tiles(lambda rows: self._product_of_torch(rows, fusion.bias), x))
        if len(x) == 1 and not self.row_order.single:
            return Product(self._product_of_torch(x.expand(2, -1).contiguous(), fusion.bias)[:1])
        return Product(self._product_of_torch(x, fusion.bias))

    def _find_row_order(self) -> RowOrder:
        """Compare products of different numbers of rows; those of equal shapes are computed alike."""
        key = self.out_features, self.in_features, torch.get_num_threads()
        if key not in _row_orders:
            x = torch.randn(max(COMPARED_ROWS), self.in_features, generator=torch.Generator().manual_seed(0))
            products = [self._product_of_torch(x[:count], None) for count in COMPARED_ROWS]
            singles = [self._product_of_torch(x[row : row + 1], None) for row in range(4)]
            several = all(torch.equal(product, products[-1][: len(product)]) for product in products)
            _row_orders[key] = RowOrder(torch.equal(torch.cat(singles), products[-1][:4]), several)
        return _row_orders[key]

    def _product_of_torch(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is None:
            assert self.plain is not None
            return F.linear(x, self.plain, bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return output

    def _product_in_kernel(self, x: Tensor, fusion: Fusion) -> Product:
        from chairlift.kernels.triton.products.invariant import invariant_linear
        from chairlift.kernels.triton.products.product import product

        assert self.plain is not None
        if self.batch_invariant and on_gpu(x.device) and not self._has_own_kernel:
            return Product(invariant_linear(x, self.plain, fusion.bias, add_to=fusion.add_to))
        result = product(
            x.contiguous(),
            self.plain,
            squares=fusion.squares,
            eps=fusion.eps,
            bias=fusion.bias,
            gated=fusion.gated,
            times=fusion.times,
            activation=fusion.activation,
            add_to=fusion.add_to,
            invariant=self.batch_invariant,
        )
        return Product(*result)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight prepacked and multiply with it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32

"""LoRA adapters as terms of products: x Wᵀ + (x Aᵀ) Bᵀ, where every row of a batch may have its own A and B.

A weight of any format is wrapped once (`AdaptedWeight`); which adapters are in memory, and which rows have which, is
kept at one place for all products of a model (`AdapterBank`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import AdapterRows
from chairlift.kernels.adapter_table import WIDTH, entry
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import ALONE, Fusion, FusionPart, Product, WeightFormat
from chairlift.layers.linear import Linear

if TYPE_CHECKING:
    from chairlift.kernels.cpu.adapters import Terms  # numba is slow to import


class PartTerm(NamedTuple):
    """The second matrix of some output channels."""

    first: int
    b: Tensor  # [rank, channels], with the scale in it


class ProductTerms(NamedTuple):
    """What an adapter adds to one product, whose parts may be adapted apart."""

    a: Tensor  # [ranks of all parts, in]
    parts: Sequence[PartTerm]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)


PackedAdapter = Mapping[int, ProductTerms]
"""The terms of an adapter by the number of the product."""


class AdaptedWeight(WeightFormat):
    """A weight of any format with the terms of adapters: a product of rows with adapters is that of the weight, and
    their terms are added to it."""

    def __init__(self, base: WeightFormat, bank: AdapterBank, product: int) -> None:
        self.base = base
        self._bank, self._number = bank, product
        self.out_features, self.in_features = base.out_features, base.in_features
        self.dtype, self.device, self.shared, self.name = base.dtype, base.device, base.shared, base.name  # type: ignore[misc]
        self.traits = base.traits  # type: ignore[misc]
        self.batch_invariant, self.looked_up, self.restored = base.batch_invariant, base.looked_up, base.restored
        self.plain, self.tiles, self.owns_tiles, self.panels = base.plain, base.tiles, base.owns_tiles, base.panels

    def pack(self) -> None:
        raise AssertionError("adapters are attached to packed weights")

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    @property
    def own_bytes(self) -> int:
        return self.base.own_bytes

    @property
    def row_major(self) -> None:
        """Kernels that read the weight itself would leave out the terms."""
        return None

    def fuses(self, part: FusionPart, rows: int) -> bool:
        """What is behind a product has to wait for its terms."""
        return not self._bank.has_rows and self.base.fuses(part, rows)

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        result = self.base.product(x, fusion)
        if self._bank.has_rows:
            assert fusion.is_alone, "nothing is fused with a product that has terms"
            self._bank.add(self._number, x, result.rows)
        return result


class AdapterBank:
    """The adapters in memory by their slots, and the rows of the step that is running."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int]] = []  # The inputs and outputs of each adapted product.
        self._adapters: dict[int, PackedAdapter] = {}
        self._rows: AdapterRows | None = None
        self._picked: Tensor | None = None  # the only rows of the step that products still have
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self._most_ranks: dict[int, int] = {}  # The largest rank among the products of the adapter in a slot.
        self._table = np.zeros((0, 0, 0), dtype=np.int64)
        self._device_table: Tensor | None = None

    # ---- what is adapted ------------------------------------------------------------------------------------------

    def attach(self, linears: Sequence[Linear], device: torch.device, dtype: torch.dtype, max_slots: int) -> None:
        """Let adapters be terms of these products, which are numbered in this order."""
        self._device, self._dtype = device, dtype
        for number, linear in enumerate(linears):
            self.products.append((linear.in_features, linear.out_features))
            linear.weight = AdaptedWeight(linear.weight, self, number)
        self._table = np.zeros((max_slots, len(linears), WIDTH), dtype=np.int64)
        if on_gpu(device):
            self._device_table = torch.from_numpy(self._table).to(device)

    @property
    def is_attached(self) -> bool:
        return bool(self.products)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Make an adapter, whose numbers are on the device, the one of a slot."""
        self._adapters[slot] = adapter
        self._most_ranks[slot] = max((len(terms.a) for terms in adapter.values()), default=0)
        self._table[slot] = 0
        for number, terms in adapter.items():
            self._table[slot, number] = entry(terms.a, [(part.first, part.b) for part in terms.parts])
        self._send(slot)

    def drop(self, slot: int) -> None:
        """Free the memory of a slot's adapter; no step that uses it is in flight."""
        del self._adapters[slot], self._most_ranks[slot]
        self._table[slot] = 0
        self._send(slot)

    def _send(self, slot: int) -> None:
        if self._device_table is not None:
            self._device_table[slot].copy_(torch.from_numpy(self._table[slot]))

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin(self, rows: AdapterRows | None) -> None:
        """Begin a step, whose rows have these adapters."""
        self._rows, self._picked = rows, None

    def pick(self, rows: Tensor) -> None:
        """Products have only these rows of the step from now on."""
        self._picked = rows

    @property
    def has_rows(self) -> bool:
        """Whether any row of the step has an adapter."""
        return self._rows is not None

    def add(self, number: int, x: Tensor, out: Tensor) -> None:
        """Add the terms of a product to `out` [R, out], whose rows were multiplied from x [R, in]."""
        rows = self._rows
        assert rows is not None
        if on_gpu(x.device):
            from chairlift.kernels.triton.products.adapters import add_terms

            assert self._device_table is not None
            add_terms(x, out, self._device_table, number, rows.slots, rows.weights, self._picked, self._dtype)
        elif x.dtype is torch.float32 and out.is_contiguous():
            self._add_compiled(number, x.contiguous(), out)
        else:
            self._add_plainly(number, x, out)

    def _add_compiled(self, number: int, x: Tensor, out: Tensor) -> None:
        from chairlift.kernels.cpu.adapters import add_terms
        from chairlift.kernels.cpu.threads import the_team

        terms = self.terms()
        picked = np.arange(len(x)) if self._picked is None else self._picked.long().numpy()
        the_team().run(add_terms, terms, picked, number, x.numpy(), out.numpy())

    def _add_plainly(self, number: int, x: Tensor, out: Tensor) -> None:
        """In any type, with torch's operations."""
        assert self._rows is not None
        slots, weights = self._rows.slots, self._rows.weights
        if self._picked is not None:
            slots, weights = slots[self._picked.long()], weights[self._picked.long()]
        for k in range(slots.shape[1]):
            for slot in slots[:, k].unique().tolist():
                terms = self._adapters[slot].get(number) if slot >= 0 else None
                if terms is None:
                    continue
                index = (slots[:, k] == slot).nonzero()[:, 0]
                shrunk = (x[index].float() @ terms.a.float().mT) * weights[index, k, None]
                start = 0
                for first, b in terms.parts:
                    term = shrunk[:, start : start + len(b)] @ b.float()
                    columns = slice(first, first + b.shape[1])
                    out[index, columns] = (out[index, columns].float() + term).to(out.dtype)
                    start += len(b)

    def terms(self) -> Terms:
        """The step as compiled kernels of a CPU read it."""
        from chairlift.kernels.cpu.adapters import NO_TERMS, Terms

        if self._rows is None:
            return NO_TERMS
        if self._rows.host is None:
            slots, weights = self._rows.slots.numpy(), self._rows.weights.numpy()
            ranks = max((self._most_ranks[slot] for slot in np.unique(slots).tolist() if slot >= 0), default=0)
            shrunk = np.empty((*slots.shape, ranks), dtype=np.float32)
            self._rows.host = Terms(self._table, slots, weights, shrunk)
        terms: Terms = self._rows.host
        return terms

    # ---- memory ---------------------------------------------------------------------------------------------------

    def placed(self, adapter: PackedAdapter) -> PackedAdapter:
        """The adapter in memory of the device: on a GPU in the model's type, on a CPU in float32, or in bfloat16 where
        that is exact and so half as much is read."""
        dtype = self._dtype if on_gpu(self._device) else _exact_type(adapter)

        def stored(matrix: Tensor) -> Tensor:
            return matrix.to(self._device, dtype).contiguous()

        return {
            number: ProductTerms(stored(terms.a), [PartTerm(part.first, stored(part.b)) for part in terms.parts])
            for number, terms in adapter.items()
        }


def _exact_type(adapter: PackedAdapter) -> torch.dtype:
    matrices = (matrix for terms in adapter.values() for matrix in (terms.a, *(part.b for part in terms.parts)))
    return torch.bfloat16 if all(torch.equal(each.bfloat16().to(each), each) for each in matrices) else torch.float32

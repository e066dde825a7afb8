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
from chairlift.kernels.adapter_table import RANK, WIDTH, entry, numbers_of, padded
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


PackedAdapter = Mapping[int, ProductTerms]
"""The terms of an adapter by the number of the product."""


class PlacedAdapter(NamedTuple):
    """An adapter in memory of the device, as kernels read it."""

    entries: Mapping[int, list[int]]  # The table's entries, by the number of the product.
    memory: Sequence[Tensor]  # The memory of its numbers.

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)


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
        self._adapters: dict[int, PlacedAdapter] = {}
        self._rows: AdapterRows | None = None
        self._picked: Tensor | None = None  # the only rows of the step that products still have
        self._picked_terms: Terms | None = None  # Compiled kernels read these rows so.
        self._device, self._dtype = torch.device("cpu"), torch.float32
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

    def put(self, slot: int, adapter: PlacedAdapter) -> None:
        """Make an adapter the one of a slot."""
        self._adapters[slot] = adapter
        self._table[slot] = 0
        for number, numbers in adapter.entries.items():
            self._table[slot, number] = numbers
        self._send(slot)

    def drop(self, slot: int) -> None:
        """Free the memory of a slot's adapter; no step that uses it is in flight."""
        del self._adapters[slot]
        self._table[slot] = 0
        self._send(slot)

    def _send(self, slot: int) -> None:
        if self._device_table is not None:
            self._device_table[slot].copy_(torch.from_numpy(self._table[slot]))

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin(self, rows: AdapterRows | None) -> None:
        """Begin a step, whose rows have these adapters."""
        self._rows, self._picked, self._picked_terms = rows, None, None

    def pick(self, rows: Tensor) -> None:
        """Products have only these rows of the step from now on."""
        self._picked, self._picked_terms = rows, None

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
        else:
            self._add_compiled(number, x.float().contiguous(), out)

    def _add_compiled(self, number: int, x: Tensor, out: Tensor) -> None:
        from chairlift.kernels.cpu.adapters import add_terms
        from chairlift.kernels.cpu.threads import the_team

        if self._picked_terms is None:
            self._picked_terms = self.terms(self._picked)
        terms, wide = self._picked_terms, out.float().contiguous()
        the_team().run(add_terms, terms, terms.picked, number, x.numpy(), wide.numpy())
        if wide is not out:
            out.copy_(wide)

    def terms(self, picked: Tensor | None = None) -> Terms:
        """The step as compiled kernels of a CPU read it; `picked`: the only rows behind the last attention."""
        from chairlift.kernels.cpu.adapters import NO_TERMS, Terms, group_rows

        if self._rows is None:
            return NO_TERMS
        slots, weights = self._rows.slots.numpy(), self._rows.weights.numpy()
        groups = group_rows(slots, weights)
        ranks = padded(int(self._table[groups.slots, :, RANK].max(initial=0)))
        shrunk = np.empty((2, len(groups.rows), ranks), dtype=np.float32)
        only = groups if picked is None else group_rows(slots, weights, picked.numpy())
        return Terms(self._table, groups, only, shrunk)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def padded(self, columns: int) -> int:
        """As many columns as a matrix takes in memory of the device."""
        return columns if on_gpu(self._device) else padded(columns)

    def placed(self, adapter: PackedAdapter) -> PlacedAdapter:
        """The adapter in memory of the device: on a GPU in the model's type, on a CPU in float32, or in bfloat16 where
        that is exact and so half as much is read."""
        if not on_gpu(self._device):
            return _in_panels(adapter)

        def stored(matrix: Tensor) -> Tensor:
            return matrix.to(self._device, self._dtype).contiguous()

        entries, memory = {}, []
        for number, terms in adapter.items():
            a, parts = stored(terms.a), [(part.first, stored(part.b)) for part in terms.parts]
            entries[number] = entry(a, parts)
            memory += [a, *(b for _, b in parts)]
        return PlacedAdapter(entries, memory)


def _in_panels(adapter: PackedAdapter) -> PlacedAdapter:
    """Place an adapter in one piece of host memory, in the order in which it is read."""
    from chairlift.kernels.cpu.adapters import put_panels
    from chairlift.kernels.cpu.aligned import aligned

    matrices = [matrix for terms in adapter.values() for matrix in (terms.a.mT, *(part.b for part in terms.parts))]
    is_half = all(torch.equal(matrix.bfloat16().to(matrix), matrix) for matrix in matrices)
    dtype = np.uint16 if is_half else np.float32
    memory = aligned((sum(len(matrix) * padded(matrix.shape[1]) for matrix in matrices),), dtype)
    start = 0

    def put(matrix: Tensor) -> int:
        """Write a matrix behind those before it; return its address."""
        nonlocal start
        begin, start = start, start + len(matrix) * padded(matrix.shape[1])
        numbers = matrix.bfloat16().view(torch.uint16) if is_half else matrix.float()
        put_panels(memory[begin:start], numbers.numpy())
        return memory[begin:].ctypes.data

    entries = {
        number: numbers_of(
            put(terms.a.mT),
            len(terms.a),
            is_half,
            [(part.first, part.b.shape[1], len(part.b), put(part.b)) for part in terms.parts],
        )
        for number, terms in adapter.items()
    }
    return PlacedAdapter(entries, [torch.from_numpy(memory)])

"""Weights in the form in which a quantized checkpoint stores them, where the device can compute with it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ALONE, FormatTraits, Fusion, Product, WeightFormat, empty_in_place_of
from chairlift.layers.formats.none import PlainWeight
from chairlift.loading.stored_weight import StoredWeight


@FORMATS.register("checkpoint")
class CheckpointWeight(WeightFormat):
    """Collects what the checkpoint stores for a linear map; a format that accepts it takes its place.

    Maps that are not quantized, and those in a form that no format accepts, become plain weights.
    """

    name = "checkpoint"
    traits = FormatTraits(
        stores_experts=True,
        keeps_stored=True,
        keeps_blocks=True,
        rounded_head="fp8",  # checkpoints in 4 bits leave the head in 16
        fuses=PlainWeight.traits.fuses,  # It is asked before the formats that take its place are known.
    )

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._parts: dict[int, Tensor | StoredWeight] = {}

    def fill_rows(self, first: int, source: Tensor | StoredWeight) -> None:
        self._parts[first] = source

    def scale_columns(self, factors: Tensor) -> bool:
        plain = {first: part for first, part in self._parts.items() if isinstance(part, Tensor)}
        if len(plain) < len(self._parts):
            return False  # Stored numbers would have to be rounded once more.
        for first, part in plain.items():
            self._parts[first] = part.to(factors) * factors
        return True

    def finalized(self) -> WeightFormat:
        weight: WeightFormat
        if not self._parts:  # It was made from a tensor: a tied head from the table, one of drafts from rows of a head.
            assert self.plain is not None
            weight = PlainWeight(self.plain, shared=self.shared)
            weight.batch_invariant = self.batch_invariant
            return weight.finalized()
        stored = [part for _, part in sorted(self._parts.items()) if isinstance(part, StoredWeight)]
        format = self._accepting_format(stored) if len(stored) == len(self._parts) else None
        if format is not None:
            weight = empty_in_place_of(self, format)
            weight.load(stored)
        else:
            weight = empty_in_place_of(self, PlainWeight)
            for first, part in self._parts.items():
                weight.fill_rows(first, part)
        self._parts.clear()
        return weight.finalized()

    def _accepting_format(self, stored: Sequence[StoredWeight]) -> type[WeightFormat] | None:
        """The first format, by name, that computes with these weights as they are stored."""
        formats = (FORMATS.get(name) for name in FORMATS.names())
        accepting = next((each for each in formats if each.accepts(stored, self.dtype, self.device)), None)
        can_look_up = accepting is None or accepting.traits.keeps_blocks or not self.looked_up
        return accepting if can_look_up else None

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        raise AssertionError("replaced by another format when it is finalized")

    @property
    def num_bytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize

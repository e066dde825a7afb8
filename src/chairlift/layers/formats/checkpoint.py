"""Weights in the form in which a quantized checkpoint stores them, where the device can compute with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.errors import InvalidParameter
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.layers.formats.none import PlainWeight
from chairlift.loading.stored_weight import StoredWeight


@FORMATS.register("checkpoint")
class CheckpointWeight(WeightFormat):
    """Collects what the checkpoint stores for a linear map; a format that accepts it takes its place.

    Maps that are not quantized, and those in a form that no format accepts, become plain weights.
    """

    name = "checkpoint"
    stores_experts = True
    keeps_stored = True
    keeps_blocks = True
    most_fused_rows = PlainWeight.most_fused_rows

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._parts: dict[int, Tensor | StoredWeight] = {}

    @classmethod
    def for_head(cls, dtype: torch.dtype, device: torch.device, *, quantize: bool) -> type[WeightFormat]:
        """As stored, or in 8-bit floats: checkpoints in 4 bits leave it in 16."""
        if not quantize:
            return cls
        if obstacles := FP8Weight.obstacles(dtype, device):
            problem = f"is not possible with a quantized checkpoint: {'; '.join(obstacles)}"
            raise InvalidParameter("quantize_head", problem)
        return FP8Weight

    def fill_rows(self, first: int, source: Tensor | StoredWeight) -> None:
        self._parts[first] = source

    def scale_columns(self, factors: Tensor) -> bool:
        plain = {first: part for first, part in self._parts.items() if isinstance(part, Tensor)}
        if len(plain) < len(self._parts):
            return False  # stored numbers would have to be rounded once more
        for first, part in plain.items():
            self._parts[first] = part.to(factors) * factors
        return True

    def finalized(self) -> WeightFormat:
        parts = [self._parts[first] for first in sorted(self._parts)]
        format = _accepting(parts, self.dtype, self.device)
        if self.looked_up and not format.keeps_blocks:
            format = PlainWeight
        weight: WeightFormat
        if self.shared or not parts:  # a tied head: the embedding table was filled
            assert self.plain is not None
            weight = PlainWeight(self.plain, shared=self.shared)
        else:
            weight = format.empty(self.out_features, self.in_features, self.dtype, self.device)
        weight.batch_invariant, weight.looked_up = self.batch_invariant, self.looked_up
        if format is PlainWeight:
            for first, part in self._parts.items():
                weight.fill_rows(first, part)
        else:
            weight.load([part for part in parts if isinstance(part, StoredWeight)])
        self._parts.clear()
        return weight.finalized()

    def pack(self) -> None:
        raise AssertionError("replaced by another format when it is finalized")

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("replaced by another format when it is finalized")

    @property
    def num_bytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize


def _accepting(parts: Sequence[Tensor | StoredWeight], dtype: torch.dtype, device: torch.device) -> type[WeightFormat]:
    stored = [part for part in parts if isinstance(part, StoredWeight)]
    if not stored or len(stored) != len(parts):
        return PlainWeight
    for name in FORMATS.names():
        format = FORMATS.get(name)
        if format.accepts(stored, dtype, device):
            return format
    return PlainWeight

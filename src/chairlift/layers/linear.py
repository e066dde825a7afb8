"""A linear map, and what the parts of a model are built with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chairlift.layers.formats.base import Fusion, FusionPart, WeightFormat, WeightRows
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.parts import Part, Targets


@dataclass(frozen=True, slots=True)
class Build:
    """The type and the place of the weights of a model, and the format of its linear maps."""

    dtype: torch.dtype
    device: torch.device
    format: type[WeightFormat] = PlainWeight

    @property
    def plain(self) -> Build:
        """The same for maps that are not rounded."""
        return replace(self, format=PlainWeight)

    def linear(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        weight = self.format.empty(out_features, in_features, self.dtype, self.device)
        return Linear(weight, self.empty(out_features) if bias else None)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


class Linear(Part):
    """`y = x Wᵀ + b`: made empty, filled from a checkpoint, then finalized. The format of the weight multiplies."""

    def __init__(
        self,
        weight: Tensor | WeightFormat,
        bias: Tensor | None = None,
        *,
        format: type[WeightFormat] = PlainWeight,
        shared: bool = False,
    ) -> None:
        """`shared`: the tensor is also read elsewhere (a tied head and its embedding table)."""
        self.weight = weight if isinstance(weight, WeightFormat) else format(weight, shared=shared)
        self.bias = bias
        self._alone = Fusion(bias)
        self.out_features, self.in_features = self.weight.out_features, self.weight.in_features

    def targets(self, names: Sequence[str], sizes: Sequence[int] | None = None) -> Targets:
        """The tensors to fill; a map that a checkpoint holds in parts has a name and a size for each part."""
        sizes = [self.out_features] if sizes is None else list(sizes)
        first = 0
        for name, size in zip(names, sizes, strict=True):
            yield f"{name}.weight", WeightRows(self.weight, first, size)
            first += size
        if self.bias is not None:
            for name, part in zip(names, self.bias.split(sizes), strict=True):
                yield f"{name}.bias", part

    def linears(self) -> tuple[Linear, ...]:
        return (self,)

    @property
    def num_bytes(self) -> int:
        return self.weight.own_bytes + (0 if self.bias is None else self.bias.nbytes)

    def finalize(self) -> None:
        self.weight = self.weight.finalized()

    def make_batch_invariant(self) -> None:
        self.weight.batch_invariant = True

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # a step that samples nothing; neither oneDNN nor tensor descriptors accept zero rows
            return x.new_empty(0, self.out_features)
        return self.weight.product(x, self._alone).rows

    def fuses(self, part: FusionPart, rows: int) -> bool:
        """Whether the kernel of the product does this as well, where there is no bias between them."""
        return self.bias is None and self.weight.fuses(part, rows)

"""A linear map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.layers.formats.base import Fusion, Part, WeightFormat, WeightRows
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.parts import Targets


class Linear:
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

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
    ) -> Linear:
        weight = format.empty(out_features, in_features, dtype, device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

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

    def fuses(self, part: Part, rows: int) -> bool:
        """Whether the kernel of the product does this as well, where there is no bias between them."""
        return self.bias is None and self.weight.fuses(part, rows)

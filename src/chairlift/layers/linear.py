"""A linear map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.layers.formats.base import WeightFormat
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
        yield from self.weight.targets(names, sizes)
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
        return self.weight.multiply(x, self.bias)

    def gates_in_place(self, x: Tensor) -> bool:
        """Whether one kernel does the product with `x` and the gate behind it."""
        return self.bias is None and self.weight.gates_in_place(x)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """The activation of the first half of the product times the second half, where `gates_in_place` allows it."""
        return self.weight.gated(x, activation)

    def activates_in_place(self, x: Tensor) -> bool:
        """Whether one kernel does the product with `x`, an activation, and a product of numbers with its result."""
        return self.bias is None and self.weight.activates_in_place(x)

    def activated(self, x: Tensor, activation: str, times: Tensor) -> Tensor:
        """The activation of the product times `times` [T, out_features], where `activates_in_place` allows it."""
        return self.weight.activated(x, activation, times)

    def adds_in_place(self, x: Tensor) -> bool:
        """Whether one kernel does the product with `x` and adds it to another tensor."""
        return self.bias is None and self.weight.adds_in_place(x)

    def add_to_(self, total: Tensor, x: Tensor) -> None:
        """total [T, out_features] += x Wᵀ, where `adds_in_place` allows it."""
        self.weight.add_to_(total, x)

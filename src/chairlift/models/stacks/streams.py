"""The residual stream of a decoder on a GPU, with the products that read it and are added to it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.formats.base import ScaledRows
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.mlp import gated as gate
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.norm import Norm, add_normed_
from chairlift.models.stacks.base import MANY_ROWS, picked


class Stream(ABC):
    """The residual stream [rows, hidden] of one step."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def num_rows(self) -> int:
        return len(self.x)

    @abstractmethod
    def value(self) -> Tensor:
        """The stream, which may change with the next call."""

    @abstractmethod
    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        """The normed stream times a weight."""

    @abstractmethod
    def add_product(self, linear: Linear, y: Tensor, next_norm: Norm | None) -> None:
        """Add y times a weight."""

    @abstractmethod
    def add_gated_products(self, norm: Norm | None, mlp: GatedMLP, next_norm: Norm | None) -> None:
        """Add the feed-forward block of the normed stream."""

    @abstractmethod
    def add_experts(
        self, norm: Norm | None, experts: MixtureOfExperts, positions: Tensor, next_norm: Norm | None
    ) -> None:
        """Add the mixture of experts of the normed stream."""

    @abstractmethod
    def pick(self, rows: Tensor, y: Tensor) -> Tensor:
        """Only these rows are needed from now on; returns y, without the others if they are dropped at once."""

    @abstractmethod
    def normed(self, norm: Norm) -> Tensor:
        """The normed stream."""


class FusedStream(Stream):
    """For few rows: a norm is part of the product behind it, an addition of the product before it.

    Between two products it has what the next norm needs: the rows' sums of squares, or the norm itself.
    """

    def __init__(self, x: Tensor, squares: Tensor) -> None:
        super().__init__(x)
        self._squares: Tensor | None = squares
        self._normed: Tensor | None = None
        self._picked: Tensor | None = None

    def value(self) -> Tensor:
        return self.x

    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        return self._product(norm, linear, gated=False)

    def add_gated_products(self, norm: Norm | None, mlp: GatedMLP, next_norm: Norm | None) -> None:
        inner = self._product(norm, mlp.gate_up, gated=True)
        self.add_product(mlp.down, inner, next_norm)

    def add_experts(
        self, norm: Norm | None, experts: MixtureOfExperts, positions: Tensor, next_norm: Norm | None
    ) -> None:
        assert norm is not None
        assert next_norm is not None
        if self._squares is not None and self._adds_experts(experts):
            from chairlift.kernels.triton.experts.few_rows import RowNorm

            self._squares = experts.add_few_rows(self.x, RowNorm(self._squares, norm.weight, norm.eps), positions)
        else:
            rows = norm(self.x) if self._normed is None else self._normed
            self._squares, self._normed = None, add_normed_(self.x, experts(rows, positions), next_norm)

    def _adds_experts(self, experts: MixtureOfExperts) -> bool:
        """Whether the kernels of experts add to the stream."""
        return experts.adds_few_rows(self.x)

    def add_product(self, linear: Linear, y: Tensor, next_norm: Norm | None) -> None:
        assert next_norm is not None
        self._squares = self._normed = None
        if linear.weight.fuses_rows(len(y), gated=False):
            self._squares = linear.weight.fused(y, add_to=self.x, bias=linear.bias)[1]
        else:  # all norms inside the layers have weights of one by now
            self._normed = add_normed_(self.x, linear(y), next_norm)

    def pick(self, rows: Tensor, y: Tensor) -> Tensor:
        if len(self.x) > MANY_ROWS:
            self.x = picked(self.x, rows)
            return picked(y, rows)
        self._picked = rows  # computing a few rows more takes less time than dropping them
        return y

    def normed(self, norm: Norm) -> Tensor:
        return norm(picked(self.x, self._picked))

    def _unnormed(self) -> Tensor:
        """What a product multiplies whose kernel divides each row by its size."""
        return self.x

    def _product(self, norm: Norm | None, linear: Linear, *, gated: bool) -> Tensor:
        assert norm is not None
        if linear.weight.fuses_rows(len(self.x), gated=gated):
            x = self._unnormed() if self._normed is None else self._normed
            return linear.weight.fused(x, squares=self._squares, eps=norm.eps, bias=linear.bias, gated=gated)[0]
        found = linear(norm(self.x) if self._normed is None else self._normed)
        return gate(found, F.silu) if gated else found


class ScaledStream(FusedStream):
    """For weights that norms cannot be part of: what adds to the stream also writes it times the next norm's weight."""

    def __init__(self, x: Tensor, squares: Tensor, first_norm: Norm | None) -> None:
        super().__init__(x, squares)
        assert first_norm is not None
        self._scaled = x * first_norm.weight.to(x.dtype)

    def _unnormed(self) -> Tensor:
        return self._scaled

    def _adds_experts(self, experts: MixtureOfExperts) -> bool:
        return False  # they do not multiply by the next norm's weight

    def add_product(self, linear: Linear, y: Tensor, next_norm: Norm | None) -> None:
        assert next_norm is not None
        self._squares = self._normed = None
        if linear.bias is None and linear.weight.fuses_rows(len(y), gated=False):
            self._squares, self._scaled = linear.weight.fused_scaled(y, add_to=self.x, next_norm=next_norm.weight)
        else:
            self._normed = add_normed_(self.x, linear(y), next_norm)


class PairedStream(FusedStream):
    """For few rows and weights in 8 bits: what writes an activation splits it into two 8-bit rows, which are multiplied
    with the weights as they are."""

    def __init__(self, x: Tensor, squares: Tensor) -> None:
        from chairlift.kernels.triton.fp8 import pairs_of

        super().__init__(x, squares)
        self._pairs = pairs_of(x)

    def _unnormed(self) -> Tensor:
        return self._pairs

    def add_product(self, linear: Linear, y: Tensor, next_norm: Norm | None) -> None:
        self._pairs, self._squares = linear.weight.fused_split(y, add_to=self.x, bias=linear.bias)

    def add_gated_products(self, norm: Norm | None, mlp: GatedMLP, next_norm: Norm | None) -> None:
        assert norm is not None
        weight, bias = mlp.gate_up.weight, mlp.gate_up.bias
        inner, _ = weight.fused_split(self._pairs, squares=self._squares, eps=norm.eps, bias=bias, gated=True)
        self.add_product(mlp.down, inner, next_norm)


class RoundedStream(Stream):
    """For many rows in 8 bits: the kernels between products write each activation once, rounded, with its scale."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self._delta: Tensor | None = None  # still to be added
        self._picked: Tensor | None = None

    def value(self) -> Tensor:
        return self.x if self._delta is None else self.x + self._delta

    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        found = linear.weight.multiply_rounded(self._rounded(norm), linear.bias)
        assert isinstance(found, Tensor)
        return found

    def add_gated_products(self, norm: Norm | None, mlp: GatedMLP, next_norm: Norm | None) -> None:
        inner = mlp.gate_up.weight.multiply_rounded(self._rounded(norm), mlp.gate_up.bias, gated=True)
        assert isinstance(inner, ScaledRows)
        self._add(mlp.down, inner)

    def add_experts(
        self, norm: Norm | None, experts: MixtureOfExperts, positions: Tensor, next_norm: Norm | None
    ) -> None:
        assert norm is not None
        rows = norm(self.x) if self._delta is None else add_normed_(self.x, self._delta, norm)
        self._delta = experts(rows, positions)

    def add_product(self, linear: Linear, y: Tensor, next_norm: Norm | None) -> None:
        from chairlift.layers.formats.fp8 import round_rows

        self._add(linear, round_rows(y))

    def pick(self, rows: Tensor, y: Tensor) -> Tensor:
        if len(self.x) > MANY_ROWS:
            self.x, self._delta = picked(self.value(), rows), None
            return picked(y, rows)
        self._picked = rows  # computing a few rows more takes less time than dropping them
        return y

    def normed(self, norm: Norm) -> Tensor:
        if self._picked is not None or self._delta is None:
            return norm(picked(self.value(), self._picked))
        return add_normed_(self.x, self._delta, norm)

    def _rounded(self, norm: Norm | None) -> ScaledRows:
        from chairlift.layers.formats.fp8 import norm_rounded

        assert norm is not None
        delta, self._delta = self._delta, None
        return norm_rounded(self.x, delta, norm.weight, norm.eps)

    def _add(self, linear: Linear, rows: ScaledRows) -> None:
        if linear.weight.adds_rounded(len(self.x)):
            linear.weight.multiply_rounded(rows, linear.bias, add_to=self.x)
        else:  # the next norm adds it
            found = linear.weight.multiply_rounded(rows, linear.bias)
            assert isinstance(found, Tensor)
            self._delta = found

"""The residual stream of a decoder on a GPU, with the products that read it and are added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.formats.base import Fusion
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import DenseMLP, apply_gate
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.norm import Norm, add_normed_
from chairlift.models.decoder_layer import LayerStep, pick_rows

if TYPE_CHECKING:
    from chairlift.layers.formats.fp8 import ScaledRows

MANY_ROWS = 256  # Up to this number, computing a row more in one layer takes less time than dropping it.


class BlockNorms(NamedTuple):
    """The norms around a block whose output is added to the stream."""

    before: Norm | None = None
    after: Norm | None = None  # It norms the output.
    following: Norm | None = None  # the one in front of the next block


class Stream:
    """The residual stream [rows, hidden] of one step.

    What the kernels of a product do not add themselves waits for the next norm: one pass over the data adds it, with
    the norms around the addition.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._delta: Tensor | None = None  # It is still to be added to x.
        self._after: Norm | None = None  # It norms what is to be added.
        self._scalar: Tensor | None = None  # It multiplies the sum.
        self._squares: Tensor | None = None  # partial sums of squares of the rows of x, if a kernel has computed them
        self._rows: Tensor | None = None  # the only rows that are needed

    def copy(self) -> Tensor:
        """A copy of the stream."""
        if self._delta is None:
            return self.x.clone()
        return add_normed_(self.x.clone(), self._delta, None, after=self._after, scalar=self._scalar)

    def normed(self, norm: Norm | None) -> Tensor:
        """The normed stream."""
        if self._delta is None:
            return self.x if norm is None else norm(self.x)
        delta, after, scalar = self._delta, self._after, self._scalar
        self._delta = self._after = self._scalar = None
        return add_normed_(self.x, delta, norm, after=after, scalar=scalar)

    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        """The normed stream times a weight."""
        return linear(self.normed(norm))

    def add_late(self, output: Tensor, after: Norm | None) -> None:
        """Add the norm of a block's output."""
        self._delta, self._after, self._squares = output, after, None

    def add(self, linear: Linear, y: Tensor, norms: BlockNorms, experts: MixtureOfExperts | None = None) -> None:
        """Add y times a weight; `experts`: those that follow, if their kernels have the norm between."""
        self.normed(None)
        self._squares = None
        if experts is not None and linear.weight.fuses("add", len(y)) and experts.adds_few_rows(self.x):
            self._squares = linear.weight.product(y, Fusion(linear.bias, add_to=self.x)).squares
        elif norms.after is None and linear.fuses("add", len(y)):
            linear.weight.product(y, Fusion(add_to=self.x))
        else:
            self.add_late(linear(y), norms.after)

    def add_dense(self, mlp: DenseMLP, norms: BlockNorms, beside: Tensor | None = None) -> None:
        """Add a feed-forward block of the normed stream, or of the rows `beside`."""
        rows = self.normed(norms.before if beside is None else None)
        self.add(mlp.down, mlp.inner(rows if beside is None else beside), norms)

    def add_experts(
        self, experts: MixtureOfExperts, positions: Tensor, norms: BlockNorms, beside: Tensor | None = None
    ) -> None:
        """Add a mixture of experts of the normed stream, or of the rows `beside`."""
        if self._squares is not None:
            self._add_few_rows(norms.before, experts, positions)
            self._squares = None
            return
        rows = self.normed(norms.before if beside is None else None)
        self.add_late(experts(rows if beside is None else beside, positions), norms.after)

    def _add_few_rows(self, norm: Norm | None, experts: MixtureOfExperts, positions: Tensor) -> None:
        from chairlift.kernels.triton.experts.few_rows import RowNorm

        assert self._squares is not None
        assert norm is not None
        self._squares = experts.add_few_rows(self.x, RowNorm(self._squares, norm.weight, norm.eps), positions)

    def scale(self, scalar: Tensor) -> None:
        """Multiply the stream by a number [1]."""
        if self._delta is None:
            self.x.mul_(scalar)
        else:
            self._scalar = scalar

    def pick(self, rows: Tensor, step: LayerStep, *, has_experts: bool) -> None:
        """Only these rows are needed from now on: drop the others, or do so at the end.

        Experts are weights that only few rows read, so that dropping many rows before them pays."""
        if len(self.x) <= MANY_ROWS and (2 * len(rows) >= len(self.x) or not has_experts):
            self._rows = rows
        else:
            self.x = pick_rows(self.x, rows)
            step.pick(rows)

    def _pick_from_many(self, rows: Tensor, step: LayerStep) -> None:
        """The same for kernels that read no positions behind the mixers, and have no adapters."""
        if len(self.x) <= MANY_ROWS:
            self._rows = rows
            return
        self.x, self._delta = pick_rows(self._sum(), rows), None
        step.mixed = [pick_rows(each, rows) for each in step.mixed]
        if len(self.x) < len(step.positions):
            step.positions = pick_rows(step.positions, rows)

    def _sum(self) -> Tensor:
        return self.x if self._delta is None else self.x + self._delta

    def final(self, norm: Norm) -> Tensor:
        """The normed stream at the end, its needed rows only."""
        normed = self.normed(norm)
        return normed if self._rows is None else pick_rows(normed, self._rows)


class FusedStream(Stream):
    """For few rows: a norm is part of the product behind it, an addition of the product before it.

    Between two products it has what the next norm needs: the rows' sums of squares, or the norm itself.
    """

    def __init__(self, x: Tensor, squares: Tensor) -> None:
        super().__init__(x)
        self._squares = squares
        self._normed: Tensor | None = None

    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        return self._product(norm, linear, gated=False)

    def add_dense(self, mlp: DenseMLP, norms: BlockNorms, beside: Tensor | None = None) -> None:
        self.add(mlp.down, self._product(norms.before, mlp.first, gated=True), norms)

    def add_experts(
        self, experts: MixtureOfExperts, positions: Tensor, norms: BlockNorms, beside: Tensor | None = None
    ) -> None:
        if self._squares is not None and self._adds_experts(experts):
            self._add_few_rows(norms.before, experts, positions)
            return
        assert norms.before is not None
        rows = norms.before(self.x) if self._normed is None else self._normed
        self._squares, self._normed = None, add_normed_(self.x, experts(rows, positions), norms.following)

    def _adds_experts(self, experts: MixtureOfExperts) -> bool:
        """Whether the kernels of experts add to the stream."""
        return experts.adds_few_rows(self.x)

    def add(self, linear: Linear, y: Tensor, norms: BlockNorms, experts: MixtureOfExperts | None = None) -> None:
        self._squares = self._normed = None
        if linear.weight.fuses("norm", len(y)):
            self._squares = linear.weight.product(y, Fusion(linear.bias, add_to=self.x)).squares
        else:  # all norms inside the layers have weights of one by now
            self._normed = add_normed_(self.x, linear(y), norms.following)

    def pick(self, rows: Tensor, step: LayerStep, *, has_experts: bool) -> None:
        self._pick_from_many(rows, step)

    def final(self, norm: Norm) -> Tensor:
        return norm(self.x if self._rows is None else pick_rows(self.x, self._rows))

    def _unnormed(self) -> Tensor:
        """What a product multiplies whose kernel divides each row by its size."""
        return self.x

    def _product(self, norm: Norm | None, linear: Linear, *, gated: bool) -> Tensor:
        assert norm is not None
        if linear.weight.fuses("norm and gate" if gated else "norm", len(self.x)):
            x = self._unnormed() if self._normed is None else self._normed
            return linear.weight.product(x, Fusion(linear.bias, self._squares, norm.eps, gated)).rows
        product = linear(norm(self.x) if self._normed is None else self._normed)
        return apply_gate(product, F.silu) if gated else product


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

    def add(self, linear: Linear, y: Tensor, norms: BlockNorms, experts: MixtureOfExperts | None = None) -> None:
        assert norms.following is not None
        self._squares = self._normed = None
        if linear.fuses("norm", len(y)):
            weight = norms.following.weight
            _, self._squares, scaled, _ = linear.weight.product(y, Fusion(add_to=self.x, next_norm=weight))
            self._scaled = self.x * weight.to(self.x.dtype) if scaled is None else scaled
        else:
            self._normed = add_normed_(self.x, linear(y), norms.following)


class PairedStream(FusedStream):
    """For few rows and weights in 8 bits: what writes an activation splits it into two 8-bit rows, which are multiplied
    with the weights as they are."""

    def __init__(self, x: Tensor, squares: Tensor) -> None:
        from chairlift.kernels.triton.fp8 import pairs_of

        super().__init__(x, squares)
        self._pairs = pairs_of(x)

    def _unnormed(self) -> Tensor:
        return self._pairs

    def add(self, linear: Linear, y: Tensor, norms: BlockNorms, experts: MixtureOfExperts | None = None) -> None:
        fusion = Fusion(linear.bias, add_to=self.x, pairs=True)
        self._pairs, self._squares, *_ = linear.weight.product(y, fusion)

    def add_dense(self, mlp: DenseMLP, norms: BlockNorms, beside: Tensor | None = None) -> None:
        assert norms.before is not None
        fusion = Fusion(mlp.first.bias, self._squares, norms.before.eps, gated=True, pairs=True)
        self.add(mlp.down, mlp.first.weight.product(self._pairs, fusion).rows, norms)


class RoundedStream(Stream):
    """For many rows in 8 bits: the kernels between products write each activation once, rounded, with its scale."""

    def copy(self) -> Tensor:
        return self.x.clone() if self._delta is None else self.x + self._delta

    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        rows = self._rounded(norm)
        return linear.weight.product(rows.numbers, Fusion(linear.bias, scales=rows.scales)).rows

    def add_dense(self, mlp: DenseMLP, norms: BlockNorms, beside: Tensor | None = None) -> None:
        rows = self._rounded(norms.before)
        inner = mlp.first.weight.product(rows.numbers, Fusion(mlp.first.bias, gated=True, scales=rows.scales))
        self._add_rounded(mlp.down, inner.rows, inner.scales)

    def add(self, linear: Linear, y: Tensor, norms: BlockNorms, experts: MixtureOfExperts | None = None) -> None:
        from chairlift.layers.formats.fp8 import round_rows

        self._add_rounded(linear, *round_rows(y))

    def pick(self, rows: Tensor, step: LayerStep, *, has_experts: bool) -> None:
        self._pick_from_many(rows, step)

    def final(self, norm: Norm) -> Tensor:
        if self._rows is not None:
            return norm(pick_rows(self._sum(), self._rows))
        return self.normed(norm)

    def _rounded(self, norm: Norm | None) -> ScaledRows:
        from chairlift.layers.formats.fp8 import norm_rounded

        assert norm is not None
        delta, self._delta = self._delta, None
        return norm_rounded(self.x, delta, norm.weight, norm.eps)

    def _add_rounded(self, linear: Linear, rows: Tensor, scales: Tensor | None) -> None:
        fusion = Fusion(linear.bias, scales=scales)
        if linear.weight.fuses("rounded add", len(self.x)):
            linear.weight.product(rows, fusion._replace(add_to=self.x))
        else:  # the next norm adds it
            self._delta = linear.weight.product(rows, fusion).rows

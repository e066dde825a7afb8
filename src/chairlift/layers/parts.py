"""What the parts of a model have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from chairlift.loading.stored_weight import StoredWeight

if TYPE_CHECKING:
    from chairlift.layers.linear import Linear


class Target(Protocol):
    """What a tensor of a checkpoint is copied to: a tensor, or some rows of a weight."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: Any, /) -> object: ...


class PermutedHeads:
    """A target in which the dimensions of every head are in another order than in the checkpoint."""

    def __init__(self, target: Target, order: Tensor, axis: int) -> None:
        """`order` [head_dim]: the dimension of a stored head that each one is; `axis` has one head behind the other."""
        self._target = target
        self._axis = axis
        self.shape = target.shape
        heads = torch.arange(0, self.shape[axis], len(order))
        self._order = (heads[:, None] + order).flatten()

    def copy_(self, source: Tensor | StoredWeight, /) -> None:
        if isinstance(source, StoredWeight):
            self._target.copy_(source.select_rows(self._order))
        else:
            self._target.copy_(source.index_select(self._axis, self._order.to(source.device)))

    def placed(self, rows: Tensor) -> Any:
        """As `WeightRows.placed`."""
        place = getattr(self._target, "placed", None)
        return None if place is None else place(rows.index_select(0, self._order))


Targets = Iterator[tuple[str, Target]]
"""Names of tensors in a checkpoint, each with the part of the model that it is copied to."""


class Part:
    """A part of a model that has weights, or consists of such parts."""

    batch_invariant = False  # every row is the same, bit for bit, whatever the other rows of the batch are

    def parts(self) -> Iterable[Part]:
        """What it consists of."""
        return ()

    def linears(self) -> tuple[Linear, ...]:
        """All linear maps in it."""
        return tuple(linear for part in self.parts() for linear in part.linears())

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts())

    def finalize(self) -> None:
        """Called once all weights are filled, before the first step."""
        for part in self.parts():
            part.finalize()

    def make_batch_invariant(self) -> None:
        self.batch_invariant = True
        for part in self.parts():
            part.make_batch_invariant()


def present(*parts: Part | None) -> tuple[Part, ...]:
    """Those parts that a model has."""
    return tuple(part for part in parts if part is not None)


def add_prefix(prefix: str, targets: Targets) -> Targets:
    return ((f"{prefix}.{name}", target) for name, target in targets)

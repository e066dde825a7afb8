"""What the parts of a model have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from chairlift.loading.stored_weight import StoredWeight


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


Targets = Iterator[tuple[str, Target]]
"""Names of tensors in a checkpoint, each with the part of the model that it is copied to."""


class Part(Protocol):
    """A part of a model that has weights."""

    @property
    def num_bytes(self) -> int: ...

    def finalize(self) -> None:
        """Called once all weights are filled, before the first step."""
        ...

    def make_batch_invariant(self) -> None:
        """Make every row the same, bit for bit, whatever the other rows of the batch are."""
        ...


def prefixed(prefix: str, targets: Targets) -> Targets:
    return ((f"{prefix}.{name}", target) for name, target in targets)

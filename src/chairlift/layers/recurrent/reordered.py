"""Rows of a weight that a checkpoint has in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.layers.parts import Target, Targets
from chairlift.loading.stored_weight import StoredWeight


def reordered(targets: Targets, heads: int, sizes: Sequence[int]) -> Targets:
    """Targets for a tensor that has, for each head, the rows of all parts (of these sizes) together.

    The weight has the parts one after the other: heads * sizes[0] rows of the first, then those of the second, ...
    """
    order = torch.arange(heads * sum(sizes)).view(heads, -1).split(list(sizes), dim=1)
    rows = torch.cat([part.flatten() for part in order])
    return ((name, ReorderedRows(target, rows)) for name, target in targets)


class ReorderedRows:
    """A target that takes the rows of a tensor in another order."""

    def __init__(self, target: Target, rows: Tensor) -> None:
        self._target, self._rows = target, rows
        self.shape = target.shape

    def copy_(self, source: Tensor | StoredWeight, /) -> None:
        values = source if isinstance(source, Tensor) else source.dequantized()
        self._target.copy_(values[self._rows.to(values.device)])

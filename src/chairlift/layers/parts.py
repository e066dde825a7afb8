"""What the parts of a model have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Target(Protocol):
    """What a tensor of a checkpoint is copied to: a tensor, or some rows of a weight."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: Any, /) -> object: ...


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

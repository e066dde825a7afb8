"""The states of recurrent layers for tests that run a model without a runner: a slot for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from chairlift.attention.recurrent import (
    NO_SLOT,
    RecurrentBatch,
    RecurrentLayer,
    RecurrentStep,
    StateStorage,
)

SLOTS = 8


class SlotStates:
    """Continues every sequence from its own slot. Slots that were not written hold NaN."""

    def __init__(self, layers: Sequence[RecurrentLayer]) -> None:
        self._storage = StateStorage(
            [
                {spec.name: torch.full((SLOTS, *spec.shape), torch.nan, dtype=spec.dtype) for spec in layer.states}
                for layer in layers
            ]
        )
        self._slots: dict[str, int] = {}

    def step(self, pieces: Sequence[tuple[str, int]]) -> RecurrentStep | None:
        """The states of one ragged batch: (sequence, number of its tokens), in the order of the rows."""
        if not self._storage.layers:
            return None
        read = [self._slots.get(name, NO_SLOT) for name, _ in pieces]
        starts = [0, *accumulate(count for _, count in pieces)]
        write = torch.full((starts[-1],), NO_SLOT, dtype=torch.int32)
        for (name, _), end in zip(pieces, starts[1:], strict=True):
            write[end - 1] = self._slots.setdefault(name, len(self._slots))
        longest = max(count for _, count in pieces)
        batch = RecurrentBatch(*(torch.tensor(x, dtype=torch.int32) for x in (starts, read)), write, longest=longest)
        return RecurrentStep(batch, self._storage)

"""The tensors that hold the states of recurrent layers, and which of them a step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chairlift.core.plan import NO_SLOT, StepPlan
from chairlift.layers.recurrent.interface import RecurrentBatch, RecurrentLayer, StateStorage


def allocate_states(layers: Sequence[RecurrentLayer], num_slots: int, device: torch.device) -> StateStorage:
    """Allocate `num_slots` slots; a slot is always written before it is read."""
    return StateStorage(
        [
            {spec.name: torch.empty((num_slots, *spec.shape), dtype=spec.dtype, device=device) for spec in layer.states}
            for layer in sorted(layers, key=lambda layer: layer.index)
        ]
    )


def build_recurrent(plan: StepPlan, offsets: Sequence[int], device: torch.device) -> RecurrentBatch:
    """The slots of a step whose sequences, chunks and then idle rows, begin at the rows `offsets`."""
    starts = np.asarray(offsets, np.int32)
    read = np.full(len(starts) - 1, NO_SLOT, np.int32)
    write = np.full(int(starts[-1]), NO_SLOT, np.int32)
    for index, states in enumerate(plan.states):
        read[index] = states.read
        for row, slot in states.writes:
            write[starts[index] + row] = slot
    first, second, third = (torch.from_numpy(array).to(device) for array in (starts, read, write))
    return RecurrentBatch(first, second, third, longest=int(np.diff(starts).max()))

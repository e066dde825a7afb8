"""The tensors that hold the states of recurrent layers, and which of them a step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from chairlift.attention.batch import StepBatch
from chairlift.attention.recurrent import RecurrentBatch, RecurrentLayer, RecurrentStep, StateStorage
from chairlift.core.plan import NO_SLOT, StepPlan


def allocate_states(layers: Sequence[RecurrentLayer], num_slots: int, device: torch.device) -> StateStorage | None:
    """Allocate `num_slots` slots, each of which is written before it is read; None without recurrent layers."""
    if not layers:
        return None
    return StateStorage(
        [
            {spec.name: torch.empty((num_slots, *spec.shape), dtype=spec.dtype, device=device) for spec in layer.states}
            for layer in sorted(layers, key=lambda layer: layer.index)
        ]
    )


def with_states(batch: StepBatch, plan: StepPlan, storage: StateStorage | None) -> StepBatch:
    """The batch of a plan with the states that its sequences, chunks and then idle rows, read and write. Chunks of a
    plan without states begin with zeros, and theirs are not kept."""
    if storage is None:
        return batch
    starts = np.asarray(batch.layout.offsets, np.int32)
    read = np.full(len(starts) - 1, NO_SLOT, np.int32)
    write = np.full(int(starts[-1]), NO_SLOT, np.int32)
    for index, states in enumerate(plan.states):
        read[index] = states.read
        for row, slot in states.writes:
            write[starts[index] + row] = slot
    first, second, third = (torch.from_numpy(array).to(batch.tokens.device) for array in (starts, read, write))
    recurrent = RecurrentBatch(first, second, third, longest=int(np.diff(starts).max()))
    return replace(batch, recurrent=RecurrentStep(recurrent, storage))

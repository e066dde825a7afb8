"""The recurrent part of a step's inputs: buffers at fixed addresses, which captured graphs read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, RecurrentStep, StateStorage
from chairlift.core.plan import NO_SLOT, StepPlan
from chairlift.runner.gpu.packing import PackedStep
from chairlift.runner.gpu.shapes import BatchShape


class RecurrentInputs:
    """Where sequences begin and which slots they read and write, on the device and in host buffers of several steps."""

    def __init__(
        self, states: StateStorage, largest: BatchShape, device: torch.device, num_buffers: int, longest_decode: int
    ) -> None:
        """`longest_decode`: the rows of a decode with as many drafts as a request may have."""
        self._states = states
        self._longest_decode = longest_decode
        sizes = (largest.chunks + 1, largest.chunks, largest.tokens)
        self._ends = [int(end) for end in np.cumsum(sizes)]
        self._device = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        self._host = [
            torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(num_buffers)
        ]
        self.fill_padding()

    def _parts(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(starts, read, write) of a buffer."""
        first, second, third = self._ends
        return buffer[:first], buffer[first:second], buffer[second:third]

    def fill_padding(self) -> None:
        """Describe a step of padding on the device: no sequence has rows."""
        starts, read, write = self._parts(self._device)
        starts.zero_()
        read.fill_(NO_SLOT)
        write.fill_(NO_SLOT)

    def send(self, plan: StepPlan, packed: PackedStep, buffer: int) -> None:
        """Copy a step's slots to the device, with sequences in the order of their rows.

        The host buffer must not be in use by a step in flight: it goes with the staging buffer of the same number.
        """
        starts, read, write = (part.numpy() for part in self._parts(self._host[buffer]))
        order = np.argsort(packed.first_rows)
        used = len(order)
        starts[:used] = packed.first_rows[order]
        starts[used:] = plan.num_tokens  # further sequences have no rows
        read[:] = NO_SLOT
        write[: packed.shape.tokens] = NO_SLOT
        for place, index in enumerate(order.tolist() if plan.states else ()):
            states = plan.states[index]
            read[place] = states.read
            for row, slot in states.writes:
                write[packed.first_rows[index] + row] = slot
        end = self._ends[1] + packed.shape.tokens
        self._device[:end].copy_(self._host[buffer][:end], non_blocking=True)

    def step(self, shape: BatchShape) -> RecurrentStep:
        """The recurrent part of a step of this shape on the device."""
        starts, read, write = self._parts(self._device)
        longest = shape.tokens if shape.tiles else min(self._longest_decode, shape.tokens)
        batch = RecurrentBatch(starts[: shape.chunks + 1], read[: shape.chunks], write[: shape.tokens], longest)
        return RecurrentStep(batch, self._states)

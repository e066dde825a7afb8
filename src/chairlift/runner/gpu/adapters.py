"""The adapters of a step's rows on the device, where captured steps read them."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.attention.batch import AdapterRows
from chairlift.core.adapters import MOST_ADAPTERS
from chairlift.core.plan import StepPlan
from chairlift.layers.adapters import AdapterBank
from chairlift.runner.gpu.shapes import BatchShape

NONE = -1


class AdapterInputs:
    """Adapter slots and weights of up to `rows` rows, in one device buffer and in host buffers of several steps."""

    def __init__(self, rows: int, device: torch.device, num_buffers: int) -> None:
        """In a buffer, the slots of all rows come first, then the weights, as the bits of floats."""
        self._size = rows * MOST_ADAPTERS
        self._device = torch.full((2 * self._size,), NONE, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(2 * self._size, dtype=torch.int32, pin_memory=pinned) for _ in range(num_buffers)]
        self._is_padding = True  # no row on the device has an adapter

    def fill_padding(self) -> None:
        """Describe a step whose rows have no adapters."""
        self._device[: self._size].fill_(NONE)
        self._is_padding = True

    def send(self, plan: StepPlan, shape: BatchShape, first_rows: np.ndarray, buffer: int) -> None:
        """Copy the adapters of a step's rows to the device; steps of the base model alone copy nothing.

        The host buffer must not be in use by a step in flight: it goes with the staging buffer of the same number."""
        if not any(chunk.request.adapters for chunk in plan.chunks):
            if not self._is_padding:
                self.fill_padding()
            return
        numbers = self._host[buffer].numpy()
        slots = numbers[: self._size].reshape(-1, MOST_ADAPTERS)
        weights = numbers[self._size :].view(np.float32).reshape(-1, MOST_ADAPTERS)
        slots[:] = NONE
        for chunk, first in zip(plan.chunks, first_rows.tolist(), strict=True):
            for k, use in enumerate(chunk.request.adapters):
                rows = slice(first, first + chunk.count)
                slots[rows, k], weights[rows, k] = use.adapter.slot, use.weight
        self._device.copy_(self._host[buffer], non_blocking=True)
        self._is_padding = False

    def step(self, shape: BatchShape) -> AdapterRows:
        slots = self._device[: self._size].view(-1, MOST_ADAPTERS)[: shape.tokens]
        weights = self._device[self._size :].view(torch.float32).view(-1, MOST_ADAPTERS)[: shape.tokens]
        return AdapterRows(slots, weights)


def adapter_inputs(bank: AdapterBank | None, rows: int, device: torch.device, num_buffers: int) -> AdapterInputs | None:
    """None if the model has no adapters."""
    return None if bank is None or not bank.is_attached else AdapterInputs(rows, device, num_buffers)

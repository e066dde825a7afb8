"""Host buffers for a step's inputs and tokens, and the events of when the device started and finished it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from chairlift.runner.gpu.shapes import BatchShape


class Staging:
    """The buffers of one step at a time."""

    def __init__(self, largest: BatchShape, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.inputs = torch.zeros(largest.size, dtype=torch.int32, pin_memory=pinned)
        self.tokens = torch.zeros(largest.samples, dtype=torch.int32, pin_memory=pinned)
        self._array = self.inputs.numpy()
        self.started, self.finished = device_event(device), device_event(device)
        self._used = False
        self._views: dict[BatchShape, dict[str, np.ndarray]] = {}

    def wait(self) -> None:
        """Wait until the device has finished the step that used these buffers before."""
        if self._used:
            self.finished.synchronize()
        self._used = True

    def views(self, shape: BatchShape) -> dict[str, np.ndarray]:
        if shape not in self._views:
            if len(self._views) > 256:
                self._views.clear()
            self._views[shape] = shape.host_views(self._array)
        return self._views[shape]


class _HostClock:
    """Stands for a CUDA event on a CPU, which computes synchronously."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _HostClock) -> float:
        return (later._time - self._time) * 1e3


def device_event(device: torch.device) -> Any:
    """An event that records when the device gets to it."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostClock()

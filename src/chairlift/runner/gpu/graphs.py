"""Captured steps: all kernels of a shape, started by one call.

A capture takes 15 to 45 ms once the kernels are compiled, in which the device does nothing else: two captures at once,
or one beside a step, would share memory that only one may use. So steps are captured while there are no requests, or
when their shape occurs again. Until then, and while their kernels are being compiled, kernels are launched one by one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from chairlift.kernels.gpu import on_gpu

log = logging.getLogger("chairlift")

CAPTURE_AFTER = 2  # times that a shape occurred: a capture takes as long as two or three steps kernel by kernel
KEPT_FREE = 2**28  # bytes beside the largest step, for the driver
Shape = TypeVar("Shape", bound=Hashable)
Computed = TypeVar("Computed")
_ADVICE = "others are slower to start; lower kv_memory or max_batch_tokens"


def can_capture(device: torch.device) -> bool:
    return on_gpu(device)


def has_room(device: torch.device, step_bytes: int, taken: int) -> bool:
    """Whether the largest step, of `step_bytes`, still fits after a capture that takes `taken` and keeps it.

    To be called when torch's cache of free memory is empty.
    """
    if not can_capture(device):
        return True
    return torch.cuda.mem_get_info(device)[0] > step_bytes + KEPT_FREE + taken


@dataclass(frozen=True, slots=True)
class Graph(Generic[Computed]):
    """A captured step."""

    graph: Any
    step: Computed

    def replay(self) -> Computed:
        self.graph.replay()
        return self.step


class Graphs(Generic[Shape, Computed]):
    """The captured steps, or passes of a draft network, by shape."""

    def __init__(
        self,
        prepare: Callable[[Shape], int],
        forward: Callable[[Shape], Computed],
        likely: Sequence[Shape],
        has_room: Callable[[int], bool],
        is_ready: Callable[[Shape], bool],
    ) -> None:
        """`forward` computes a step of a shape. `prepare` computes one of padding, which loads its kernels,
        and returns the memory it took. `likely`: shapes to capture when there is time, in this order. `has_room`:
        whether there is memory for a capture of this size. `is_ready`: whether the kernels of a shape are compiled.
        """
        self._prepare = prepare
        self._forward = forward
        self.likely = likely
        self._has_room = has_room
        self._is_ready = is_ready
        self._captured: dict[Shape, Graph[Computed] | None] = {}  # None: there is no memory for it
        self._seen: dict[Shape, int] = {}  # how often shapes occurred that are not captured
        self._full = False  # there is no memory for any more
        self._pool: Any = None

    def is_typical(self, shape: Shape) -> bool:
        """Whether the next step of this shape takes as long as later ones; to be called before `find`.

        Not so if it is going to be captured.
        """
        return shape in self._captured or self._full

    def find(self, shape: Shape) -> Graph[Computed] | None:
        """The graph of a step, or None if its kernels are to be launched one by one. Counts the shape as seen."""
        if shape in self._captured:
            return self._captured[shape]
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] >= CAPTURE_AFTER and self._is_ready(shape):
            self.capture(shape)
        return self._captured.get(shape)

    @property
    def missed(self) -> list[Shape]:
        """Shapes that occurred and are not captured."""
        return list(self._seen)

    def capture_next(self) -> bool:
        """Capture a shape whose kernels are compiled, missed ones before likely ones. False if there is none."""
        missing = (shape for shape in (*self._seen, *self.likely) if shape not in self._captured)
        shape = None if self._full else next(filter(self._is_ready, missing), None)
        if shape is None:
            return False
        self.capture(shape)
        return not self._full

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        if shape in self._captured or self._full:
            return
        try:
            fits = self._has_room(self._prepare(shape))
            if not fits and None not in self._captured.values():
                log.warning(f"some steps are not captured, because the largest one needs the memory: {_ADVICE}")
            self._captured[shape] = self._record(shape) if fits else None
            self._seen.pop(shape, None)
        except RuntimeError as error:  # torch's own error, or the driver's where a graph is made of what was captured
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            self._full = True
            log.warning(f"no memory is left for captured steps: {_ADVICE}")

    def _record(self, shape: Shape) -> Graph[Computed]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _gc_disabled(), torch.cuda.graph(graph, pool=self._pool):
                step = self._forward(shape)
        finally:
            torch.cuda.set_stream(stream)  # torch does not restore it if a capture fails at its end
        return Graph(graph, step)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """No garbage collection: it could free graphs of an engine that is gone, which would spoil a capture.

    For one thread at a time, as all of capturing is.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

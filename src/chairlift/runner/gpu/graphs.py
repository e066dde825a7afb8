"""Captured steps: all kernels of a shape, started by one call.

Capturing takes as long as a hundred steps, in which the device does nothing else: two captures at once, or one beside a
step, would share memory that only one may use. So it is done when nobody waits, or when a shape has been met so often
that it is sure to pay. Until then the kernels of a step are launched one by one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.runner.gpu.batch import BatchShape
from chairlift.runner.gpu.step import ComputedStep

log = logging.getLogger("chairlift")

MEETINGS = 2  # of a shape of nothing but decodes before it is captured at once: the next steps are likely the same
KEPT_FREE = 2**28  # bytes beside the largest step: for the driver's own
_ADVICE = "others are slower to start; lower kv_memory or max_batch_tokens"
MIXED_MEETINGS = 8  # of other shapes, which come and go with the prompts


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def has_room(device: torch.device, step_bytes: int, taken: int) -> bool:
    """Whether the largest step, which takes `step_bytes`, still finds them after a capture that takes as much as
    `taken`: a graph gives nothing back. To be asked when what steps have left behind is free for all."""
    if not can_capture(device):
        return True
    return torch.cuda.mem_get_info(device)[0] > step_bytes + KEPT_FREE + taken


@dataclass(frozen=True, slots=True)
class Graph:
    graph: Any
    step: ComputedStep

    def replay(self) -> ComputedStep:
        self.graph.replay()
        return self.step


class Graphs:
    def __init__(
        self,
        prepare: Callable[[BatchShape], int],
        forward: Callable[[BatchShape], ComputedStep],
        likely: Sequence[BatchShape],
        room: Callable[[int], bool],
    ) -> None:
        """`forward` computes a step of a shape, `prepare` one for nobody, which compiles what is not compiled yet, and
        says how much memory it took. `likely`: shapes to be captured when there is time, in this order. `room`: whether
        there is memory for a capture of so much."""
        self._prepare = prepare
        self._forward = forward
        self.likely = likely
        self._room = room
        self._captured: dict[BatchShape, Graph | None] = {}  # None: it would take what the largest step needs
        self._met: dict[BatchShape, int] = {}  # of those that are not captured: how often
        self._full = False  # there is no memory for more
        self._pool: Any = None

    def is_typical(self, shape: BatchShape) -> bool:
        """Whether the next step of this shape will take as long as later ones. Not if it will be captured in it, or is
        launched kernel by kernel for the last time but for that. But of shapes with prompts it is not known whether
        they will ever be met often enough. To be asked before `find`."""
        if shape in self._captured or self._full:
            return True
        return shape.tiles > 0 and self._met.get(shape, 0) + 1 < MIXED_MEETINGS

    def find(self, shape: BatchShape) -> Graph | None:
        """The graph of a step, to be replayed. None: its kernels are to be launched one by one."""
        if shape in self._captured:
            return self._captured[shape]
        self._met[shape] = self._met.get(shape, 0) + 1
        if self._met[shape] >= (MIXED_MEETINGS if shape.tiles else MEETINGS):
            self.capture(shape)
        return self._captured.get(shape)

    def capture_next(self) -> bool:
        """There is time for one: of those that were missed, else of the likely ones. False if there is none left."""
        missing = [*self._met, *(shape for shape in self.likely if shape not in self._captured)]
        if not missing or self._full:
            return False
        self.capture(missing[0])
        return not self._full

    @torch.inference_mode()
    def capture(self, shape: BatchShape) -> None:
        if shape in self._captured or self._full:
            return
        try:
            fits = self._room(self._prepare(shape))
            if not fits and None not in self._captured.values():
                log.warning(f"some steps are not captured, for memory that the largest one needs: {_ADVICE}")
            self._captured[shape] = self._record(shape) if fits else None
            self._met.pop(shape, None)
        except RuntimeError as error:  # torch's own or, where a graph is made of what was captured, the driver's
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            self._full = True
            log.warning(f"no memory is left for captured steps: {_ADVICE}")

    def _record(self, shape: BatchShape) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _garbage_left_alone(), torch.cuda.graph(graph, pool=self._pool):
                step = self._forward(shape)
        finally:
            torch.cuda.set_stream(stream)  # where a capture fails at its end, torch does not go back to it
        return Graph(graph, step)


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Graphs of an engine that is gone may be garbage: to give them back while another is captured would spoil that.
    For one thread at a time, as all of capturing is."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

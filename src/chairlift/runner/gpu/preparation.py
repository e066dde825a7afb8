"""Compiles and captures steps ahead of the requests that would wait for it.

All of it computes steps of padding: rows that belong to no request, write to no block and sample nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from chairlift.runner.device_memory import memory_taken
from chairlift.runner.gpu.graphs import Graphs, has_room
from chairlift.runner.gpu.shapes import BatchShape, Shapes, fill_padding
from chairlift.runner.gpu.step import ComputedStep


class StepPreparation:
    """Which shapes are compiled, and the graphs of those that are captured."""

    def __init__(
        self,
        forward: Callable[[BatchShape], ComputedStep],
        inputs: Tensor,
        shapes: Shapes,
        padding_cell: int,
        *,
        use_graphs: bool,
        step_bytes: int,
    ) -> None:
        """`forward` computes the step that lies in `inputs`. `step_bytes`: memory that graphs must leave free."""
        self._forward = forward
        self._inputs = inputs
        self._shapes = shapes
        self._padding_cell = padding_cell
        self.compiled: set[BatchShape] = set()
        self.graphs: Graphs | None = None
        if use_graphs:
            likely = shapes.decodes([size for size in shapes.decode_buckets if size <= 2 * shapes.max_requests])
            device = inputs.device
            self.graphs = Graphs(self._bytes_of, forward, likely, lambda taken: has_room(device, step_bytes, taken))

    def forward_padding(self, shape: BatchShape) -> ComputedStep:
        """Compute a step of this shape that consists of padding."""
        padding = np.zeros(shape.size, np.int32)
        fill_padding(shape.host_views(padding), self._padding_cell)
        self._inputs[: shape.size].copy_(torch.from_numpy(padding))
        return self._forward(shape)

    def _bytes_of(self, shape: BatchShape) -> int:
        return memory_taken(lambda: self.forward_padding(shape), self._inputs.device)

    def first_shapes(self) -> list[BatchShape]:
        """A short prompt, a single token, and one beside a longer prompt: all kernels that the first requests need."""
        one = {"chunks": 1, "samples": 1, "updates": 1}
        mixed, _ = self._shapes.choose(tokens=2, singles=0, tiles=1, **one)
        single, _ = self._shapes.choose(tokens=1, singles=1, tiles=0, **one)
        return [mixed, single, *self._shapes.beside_prompts(single)]

    @torch.inference_mode()
    def compile(self, shapes: Sequence[BatchShape]) -> None:
        """Compile the kernels of these steps in parallel, instead of one by one at their first launch."""
        missing = self._uncompiled(shapes)
        self.compiled.update(missing)
        if self._inputs.device.type != "cuda" or not missing:
            return
        from chairlift.kernels.triton.compile import compile_kernels
        from chairlift.kernels.triton.layers import begin_step_kernel

        def compute() -> None:
            for shape in missing:
                self.forward_padding(shape)

        # `begin_step_kernel` is launched all the same: its tokens are looked up in the embedding and must be valid.
        compile_kernels(compute, self._inputs.device, launched=[begin_step_kernel])

    def _uncompiled(self, shapes: Sequence[BatchShape]) -> list[BatchShape]:
        return [shape for shape in dict.fromkeys(shapes) if shape not in self.compiled]

    def prepare_next(self) -> bool:
        """Capture a likely step or, once all are captured, compile what single tokens need beside prompts.

        False if nothing is left; without graphs nothing is ever prepared.
        """
        if self.graphs is None:
            return False
        if self.graphs.capture_next():
            return True
        missing = self._uncompiled(self._beside_prompts(self.graphs.likely))
        self.compile(missing[:1])
        return bool(missing)

    def capture_decodes(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of these batch sizes now, and compile what they need beside prompts."""
        if self.graphs is None:
            return
        shapes = self._shapes.decodes(sorted(sizes, reverse=True))
        self.compile([*shapes, *self._beside_prompts(shapes)])
        for shape in shapes:
            self.graphs.capture(shape)

    def _beside_prompts(self, decodes: Sequence[BatchShape]) -> list[BatchShape]:
        return [*chain.from_iterable(map(self._shapes.beside_prompts, decodes))]

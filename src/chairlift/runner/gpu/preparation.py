"""Compiles and captures steps ahead of the requests that would wait for it.

All of it computes steps of padding: rows that belong to no request, write to no block and sample nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chairlift.kernels.graphs import Graphs, StepKernels, has_room, memory_taken
from chairlift.runner.gpu.shapes import BatchShape, RecurrentInputs, Shapes, fill_padding
from chairlift.runner.gpu.step import ComputedStep

if TYPE_CHECKING:
    from chairlift.kernels.compilation.spec import KernelSpec


class StepPreparation:
    """The kernels of steps, and the graphs of those that are captured."""

    def __init__(
        self,
        forward: Callable[[BatchShape], ComputedStep],
        inputs: Tensor,
        shapes: Shapes,
        padding_cell: int,
        *,
        use_graphs: bool,
        step_bytes: int,
        recurrent: RecurrentInputs | None = None,
    ) -> None:
        """`forward` computes the step that lies in `inputs` and `recurrent`. `step_bytes`: what graphs leave free."""
        self._forward = forward
        self._inputs = inputs
        self._shapes = shapes
        self._padding_cell = padding_cell
        self._recurrent = recurrent
        self.kernels: StepKernels[BatchShape] = StepKernels(self.forward_padding, inputs.device)
        self.graphs: Graphs[BatchShape, ComputedStep] | None = None
        if use_graphs:
            device = inputs.device
            self.graphs = Graphs(
                self._bytes_of,
                forward,
                shapes.likely(),
                lambda taken: has_room(device, step_bytes, taken),
                self.kernels.is_ready,
            )

    def is_ready(self, shape: BatchShape, *, capturable: bool) -> bool:
        """Whether the kernels for a step's shape are compiled; may overwrite the inputs.

        Without graphs, shapes are too many to know the kernels of each: they are compiled at their first launch.
        """
        if self.graphs is None:
            return True
        shapes = [shape] if capturable else self._shapes.stand_ins(shape)
        self.kernels.request(shapes)
        return all(map(self.kernels.is_ready, shapes))

    @torch.inference_mode()
    def forward_padding(self, shape: BatchShape) -> ComputedStep:
        """Compute a step of this shape that consists of padding."""
        padding = np.zeros(shape.size, np.int32)
        fill_padding(shape.host_views(padding), self._padding_cell)
        self._inputs[: shape.size].copy_(torch.from_numpy(padding))
        if self._recurrent is not None:
            self._recurrent.fill_padding()
        return self._forward(shape)

    def _bytes_of(self, shape: BatchShape) -> int:
        return memory_taken(lambda: self.forward_padding(shape), self._inputs.device)

    def compile_generic(self) -> None:
        """Compile the kernels that serve every step."""
        self.kernels.wait_for_generic(self._shapes.samples_of_all())

    def compile_first(self) -> None:
        """Start to compile the kernels of the first steps."""
        if self.graphs is not None:
            self.kernels.request(self.graphs.likely[:FIRST_SHAPES])

    def all_kernels(self) -> list[KernelSpec]:
        """Every kernel that steps may launch: generic ones, those of captured steps, and those beside long prompts."""
        likely = self._shapes.likely()
        shapes = [*likely, *self._beside_prompts(likely)]
        generic = self.kernels.kernels_of(self._shapes.samples_of_all(), generic=True)
        return [*dict.fromkeys([*generic, *self.kernels.kernels_of(shapes)])]

    def prepare_next(self) -> bool:
        """Find out the kernels of a likely step, for other processes to compile, or capture one whose kernels are
        compiled. False if there is nothing to do for now; without graphs nothing is ever prepared."""
        if self.graphs is None:
            return False
        likely = [*self.graphs.likely, *self._beside_prompts(self.graphs.likely)]
        unknown = next((shape for shape in likely if not self.kernels.is_known(shape)), None)
        if unknown is not None:
            self.kernels.request([unknown])
            return True
        return self.graphs.capture_next()

    def capture_decodes(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of these batch sizes now, and compile what they need beside prompts."""
        if self.graphs is None:
            return
        shapes = self._shapes.decodes(sorted(sizes, reverse=True))
        self.kernels.wait([*shapes, *self._beside_prompts(shapes)])
        for shape in shapes:
            self.graphs.capture(shape)

    def capture_missed(self) -> None:
        """Compile and capture the steps whose shapes occurred, and compile what others beside prompts need."""
        if self.graphs is None:
            return
        missed = self.graphs.missed
        self.kernels.wait(missed)
        self.kernels.wait_for_requested()
        for shape in missed:
            self.graphs.capture(shape)

    def _beside_prompts(self, shapes: Sequence[BatchShape]) -> list[BatchShape]:
        decodes = [shape for shape in shapes if not shape.tiles]
        return [*dict.fromkeys(chain.from_iterable(map(self._shapes.beside_prompts, decodes)))]


FIRST_SHAPES = 8  # likely steps whose kernels are compiled from the start on, most likely first

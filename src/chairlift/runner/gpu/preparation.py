"""Compiles and captures steps ahead of the requests that would wait for it, by computing steps of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from chairlift.kernels.graphs import Graphs, StepKernels, memory_taken
from chairlift.runner.gpu.forward import StepForward
from chairlift.runner.gpu.shapes import BatchShape, Shapes
from chairlift.runner.gpu.step import ComputedStep

if TYPE_CHECKING:
    from chairlift.kernels.compilation.spec import KernelSpec

FIRST_SHAPES = 8  # likely steps whose kernels are compiled from the start on, most likely first


class StepPreparation:
    """The kernels of steps, and the graphs of those that are captured."""

    def __init__(self, forward: StepForward, shapes: Shapes, has_room: Callable[[int], bool] | None) -> None:
        """`has_room`: whether there is memory for a capture of this size; None if no step is captured."""
        self._shapes = shapes
        self.forward_padding = forward.compute_padding
        device = forward.inputs.device
        self.kernels: StepKernels[BatchShape] = StepKernels(self.forward_padding, device)
        self.graphs: Graphs[BatchShape, ComputedStep] | None = None
        if has_room is not None:
            self.graphs = Graphs(
                lambda shape: memory_taken(lambda: self.forward_padding(shape), device),
                forward.compute,
                shapes.likely(),
                has_room,
                self.kernels,
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
        """Prepare a likely step; False if there is nothing to do for now. Without graphs nothing is ever prepared."""
        return self.graphs is not None and self.graphs.prepare_next(self._beside_prompts(self.graphs.likely))

    def capture_decodes(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of these batch sizes now, and compile what they need beside prompts."""
        if self.graphs is not None:
            shapes = self._shapes.decodes(sorted(sizes, reverse=True))
            self.kernels.wait([*shapes, *self._beside_prompts(shapes)])
            self.graphs.capture_all(shapes)

    def capture_missed(self) -> None:
        """Compile and capture the steps whose shapes occurred, and compile what others beside prompts need."""
        if self.graphs is not None:
            missed = self.graphs.missed
            self.kernels.wait(missed)
            self.kernels.wait_for_requested()
            self.graphs.capture_all(missed)

    def _beside_prompts(self, shapes: Sequence[BatchShape]) -> list[BatchShape]:
        decodes = [shape for shape in shapes if not shape.tiles]
        return [*dict.fromkeys(chain.from_iterable(map(self._shapes.beside_prompts, decodes)))]

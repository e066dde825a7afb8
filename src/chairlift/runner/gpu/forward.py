"""A step as kernels that read nothing but device memory, and what compiles and captures them ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import PagedLayout, StepBatch
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage
from chairlift.kernels.graphs import Graphs, StepKernels, memory_taken
from chairlift.models.base import CausalLM
from chairlift.runner.gpu.adapters import AdapterInputs
from chairlift.runner.gpu.shapes import CHUNK_ARRAYS, TILE_ARRAYS, BatchShape, RecurrentInputs, Shapes, fill_padding
from chairlift.runner.gpu.step import ComputedStep, ModelOutput
from chairlift.speculation.drafter import Drafter

if TYPE_CHECKING:
    from chairlift.kernels.compilation.spec import KernelSpec


@dataclass(eq=False, repr=False)
class StepForward:
    """Computes the step whose inputs lie on the device."""

    model: CausalLM
    attention: AttentionBackend
    storage: KVStorage
    slots: Slots
    drafter: Drafter
    inputs: Tensor
    tile_queries: int
    recurrent: RecurrentInputs | None  # the inputs of recurrent layers, if there are any
    adapters: AdapterInputs | None = None  # The adapter of each row, if the model has adapters.

    def compute(self, shape: BatchShape, *, all_rows: bool = False) -> ComputedStep:
        """The whole step. With `all_rows`, or a draft network, the result has the hidden states of all rows."""
        from chairlift.kernels.triton.launch import picked_rows
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.sampling import sample

        view, slots = shape.sections.on_device(self.inputs), self.slots
        tokens = begin_step(
            view["token"], view["slot"], slots.last_token, view["update_cell"], view["update_block"], slots.tables
        )
        batch, rows = self._batch(shape, view, tokens), view["sample_row"]
        attention = self.attention.begin(batch, self.storage)
        if not self.drafter.reads_rows and not all_rows:
            output, kept = None, self.model.hidden_states(batch, attention, rows).last
        else:
            hidden = self.model.hidden_states(batch, attention)
            output = ModelOutput(batch, attention, hidden)
            self.drafter.store(batch, view, attention, hidden)
            kept = picked_rows(output.hidden.last, rows)
        logits = self.model.logits(kept)
        sampled = torch.empty(shape.samples, dtype=torch.int32, device=self.inputs.device)
        sample(
            logits,
            tokens=sampled,
            last_token=slots.last_token,
            slots=view["sample_slot"],
            uniforms=view["uniform"],
            **{name: view[name] for name in ("temperature", "top_k", "top_p", "min_p")},
        )
        return ComputedStep(logits, sampled, output)

    def _batch(self, shape: BatchShape, view: dict[str, Tensor], tokens: Tensor) -> StepBatch:
        arrays: dict[str, Any] = {name: view[name] for name in (*CHUNK_ARRAYS, *TILE_ARRAYS)}
        layout = PagedLayout(
            slots=view["slot"],
            positions=view["position"],
            tables=self.slots.parts[0],
            num_single=shape.singles,
            tile_queries=self.tile_queries,
            beside=self.slots.parts[1:],
            **arrays,
            one_per_request=not shape.drafts,
            long_contexts=shape.long,
            deep_chunks=shape.deep,
        )
        recurrent = None if self.recurrent is None else self.recurrent.step(shape)
        adapters = None if self.adapters is None else self.adapters.step(shape)
        rows, positions = view["sample_row"], view["position"]
        return StepBatch(tokens, positions, paged=layout, sampled_rows=rows, recurrent=recurrent, adapters=adapters)

    @torch.inference_mode()
    def compute_padding(self, shape: BatchShape) -> ComputedStep:
        """Compute a step of rows that belong to no request, write to no block and sample nothing."""
        padding = np.zeros(shape.sections.size, np.int32)
        fill_padding(shape.sections.on_host(padding), self.slots.padding_cell)
        self.inputs[: len(padding)].copy_(torch.from_numpy(padding))
        if self.recurrent is not None:
            self.recurrent.fill_padding()
        if self.adapters is not None:
            self.adapters.fill_padding()
        return self.compute(shape)


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

"""A step as kernels that read nothing but device memory: what a graph captures."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import PagedLayout, StepBatch
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage
from chairlift.models.base import CausalLM
from chairlift.runner.gpu.shapes import BatchShape, RecurrentInputs, fill_padding
from chairlift.runner.gpu.step import ComputedStep, ModelOutput
from chairlift.speculation.drafter import Drafter


class StepForward:
    """Computes the step whose inputs lie on the device."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        storage: KVStorage,
        slots: Slots,
        largest: BatchShape,
        drafter: Drafter,
        *,
        tile_queries: int,
        recurrent: RecurrentInputs | None,
    ) -> None:
        """`largest`: the shape of the largest step. `recurrent`: the inputs of recurrent layers, if there are any."""
        self._model, self._attention, self._storage = model, attention, storage
        self._slots, self._drafter, self._recurrent = slots, drafter, recurrent
        self._tile_queries = tile_queries
        self.inputs = torch.zeros(largest.sections.size, dtype=torch.int32, device=model.device)

    def compute(self, shape: BatchShape, *, all_rows: bool = False) -> ComputedStep:
        """The whole step. With `all_rows`, or a draft network, the result has the hidden states of all rows."""
        from chairlift.kernels.triton.launch import picked_rows
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.sampling import sample

        view, slots = shape.sections.on_device(self.inputs), self._slots
        tokens = begin_step(
            view["token"], view["slot"], slots.last_token, view["update_cell"], view["update_block"], slots.tables
        )
        batch, rows = self._batch(shape, view, tokens), view["sample_row"]
        attention = self._attention.begin(batch, self._storage)
        if not self._drafter.reads_rows and not all_rows:
            output, kept = None, self._model.hidden_states(batch, attention, rows).last
        else:
            hidden = self._model.hidden_states(batch, attention)
            output = ModelOutput(batch, attention, hidden)
            self._drafter.store(batch, view, attention, hidden)
            kept = picked_rows(output.hidden.last, rows)
        logits = self._model.logits(kept)
        sampled = torch.empty(shape.samples, dtype=torch.int32, device=self.inputs.device)
        sample(
            logits,
            tokens=sampled,
            last_token=slots.last_token,
            slots=view["sample_slot"],
            temperature=view["temperature"],
            top_k=view["top_k"],
            top_p=view["top_p"],
            min_p=view["min_p"],
            uniforms=view["uniform"],
        )
        return ComputedStep(logits, sampled, output)

    def _batch(self, shape: BatchShape, view: dict[str, Tensor], tokens: Tensor) -> StepBatch:
        layout = PagedLayout(
            slots=view["slot"],
            positions=view["position"],
            tables=self._slots.tables,
            chunk_slot=view["chunk_slot"],
            chunk_row=view["chunk_row"],
            chunk_start=view["chunk_start"],
            chunk_count=view["chunk_count"],
            num_single=shape.singles,
            tile_chunk=view["tile_chunk"],
            tile_offset=view["tile_offset"],
            tile_queries=self._tile_queries,
            one_per_request=not shape.drafts,
            long_contexts=shape.long,
            deep_chunks=shape.deep,
        )
        recurrent = None if self._recurrent is None else self._recurrent.step(shape)
        rows = view["sample_row"]
        return StepBatch(tokens, view["position"], paged=layout, sampled_rows=rows, recurrent=recurrent)

    @torch.inference_mode()
    def compute_padding(self, shape: BatchShape) -> ComputedStep:
        """Compute a step of rows that belong to no request, write to no block and sample nothing."""
        padding = np.zeros(shape.sections.size, np.int32)
        fill_padding(shape.sections.on_host(padding), self._slots.padding_cell)
        self.inputs[: len(padding)].copy_(torch.from_numpy(padding))
        if self._recurrent is not None:
            self._recurrent.fill_padding()
        return self.compute(shape)

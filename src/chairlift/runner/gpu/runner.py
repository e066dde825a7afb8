"""The runner of a GPU, which never waits for Python.

What a request needs from step to step lives on the device: its block table and its last token. A step sends one
small buffer, replays one captured graph that ends with the sampled tokens, and copies those back in the background.
The next step can be queued before they arrive, because it finds the tokens on the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.paged.slots import Slots, Staging
from chairlift.attention.storage import sent
from chairlift.core.executor import ExecutorCapabilities
from chairlift.core.plan import NO_PROMPT_OUTPUTS, Chunk, PromptOutputs, StepPlan
from chairlift.core.request import Request, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.graphs import can_capture, has_room, kernels_for, memory_taken
from chairlift.runner.base import ModelRunner
from chairlift.runner.gpu.adapters import adapter_inputs
from chairlift.runner.gpu.forward import StepForward, StepPreparation
from chairlift.runner.gpu.shapes import RecurrentInputs, Shapes, StepSizes
from chairlift.runner.gpu.step import ComputedStep, LaunchedStep, ModelOutput, PackedStep, Packer, SampledTokens
from chairlift.runner.memory import make_copies
from chairlift.sampling.draw import TokenMasks
from chairlift.sampling.sampler import beam_candidates
from chairlift.speculation.drafter import ComputedBatch

STEPS_AHEAD = 1
STAGING_BUFFERS = STEPS_AHEAD + 2  # one being filled, and those of the steps in flight
HOST_COPIES = 4  # float32 copies of a row that the host samples: logits, edited logits, probabilities and their logs


@dataclass(eq=False, repr=False)
class GPURunner(ModelRunner):
    """Queues steps on the device, one ahead of the last result that was read."""

    sizes: StepSizes

    def __post_init__(self) -> None:
        super().__post_init__()
        model, storage, sizes, device = self.model, self.storage, self.sizes, self.model.device
        self.device = device
        spec = self.attention.batch_spec((*model.attention_layers, *self.drafter.layers), model.dtype)
        self.tile_queries = spec.tile_queries
        width = -(-sizes.context // storage.block_size)
        self.slots = Slots(sizes.requests, width, storage.block_size, device, storage.num_tables)
        use_graphs = sizes.graphs and can_capture(device) and getattr(model, "allows_capture", True)
        self.shapes = Shapes(
            sizes.requests,
            sizes.requests + sizes.drafts,
            spec.tile_queries,
            graphs=use_graphs,
            long_context=spec.long_context if sizes.context > spec.long_context else None,
            splits_more=spec.splits_more,
        )
        largest = self.largest_shape = self.shapes.largest(sizes.tokens)
        self._staging = [Staging(largest.sections.size, largest.samples, device) for _ in range(STAGING_BUFFERS)]
        self._num_steps = 0
        self._packer = Packer(self.slots, self.shapes, spec.tile_queries)
        self._recurrent: RecurrentInputs | None = None
        if self.states is not None:
            rows = 1 + sizes.drafts_per_request
            self._recurrent = RecurrentInputs(self.states, largest, device, STAGING_BUFFERS, longest_decode=rows)
        inputs, queries = torch.zeros(largest.sections.size, dtype=torch.int32, device=device), spec.tile_queries
        bank = getattr(model, "adapters", None)
        self._adapters = adapter_inputs(bank, largest.tokens, device, STAGING_BUFFERS)
        parts = model, self.attention, storage, self.slots, self.drafter, inputs, queries
        self._forward = StepForward(*parts, self._recurrent, self._adapters)
        room = partial(has_room, device, sizes.step_bytes) if use_graphs else None
        self.preparation = StepPreparation(self._forward, self.shapes, room)
        self.drafter.attach(self.slots, sizes.drafts_per_request, room if sizes.draft_graphs else None)

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(
            STEPS_AHEAD, beam_search=True, hidden_size=self.model.hidden_size, max_drafts=self.sizes.drafts
        )

    # ---- a step ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        start = time.perf_counter()
        make_copies(plan, self.storage, self.host_blocks)
        buffer = self._num_steps % STAGING_BUFFERS
        staging = self._staging[buffer]
        self._num_steps += 1
        packed = self._packer.pack(plan, staging)
        shape, sections, reads = packed.shape, packed.shape.sections, plan.reads
        self.drafter.begin(plan, packed.first_rows, staging.views(sections))
        # Captured steps keep the hidden states of all rows only for a draft network.
        capturable = packed.capturable and (not reads or self.drafter.reads_rows)
        graphs = self.preparation.graphs if capturable else None
        typical = graphs is None or graphs.is_typical(shape)
        graph = None if graphs is None else graphs.find(shape)
        tuned = graph is not None or self.preparation.is_ready(shape, capturable=packed.capturable)
        size = sections.size
        self._forward.inputs[:size].copy_(staging.inputs[:size], non_blocking=True)
        if self._recurrent is not None:
            self._recurrent.send(plan, shape, packed.first_rows, buffer)
        if self._adapters is not None:
            self._adapters.send(plan, shape, packed.first_rows, buffer)
        staging.started.record()
        on_host = self._rows_on_host(packed)
        masks = self._begin_masks([packed.chunks[index] for index in on_host])
        if graph is None:
            with kernels_for(tuned=tuned):
                step = self._forward.compute(shape, all_rows=reads)
        else:
            step = graph.replay()
        candidates = beam_candidates(packed.chunks, step.logits, one_by_one=self.one_by_one)
        from_host = self._sample_on_host(packed, on_host, step.logits, masks) if on_host else {}
        staging.results[: shape.samples].copy_(step.tokens, non_blocking=True)
        staging.finished.record()
        prompts = self._read_prompts(plan, packed, step) if reads else NO_PROMPT_OUTPUTS
        seconds = time.perf_counter() - start
        launched = LaunchedStep(plan, packed, staging, from_host, candidates, prompts, seconds, typical and tuned)
        if step.output is not None and self.drafter.reads_rows:
            self.drafter.after(_computed(plan, packed.first_rows.tolist(), step.output, launched))
        return launched

    def _rows_on_host(self, packed: PackedStep) -> list[int]:
        """The chunks that the host samples, as indices among those that sample: those with grammars, penalties, biases,
        bans or logprobs, and those whose drafts were drawn."""
        needed = self.slots.on_host[packed.slots]
        if packed.num_sampled > len(packed.chunks):  # some have drafts
            needed |= np.array([self._drawn_from(chunk) is not None for chunk in packed.chunks], np.bool_)
        indices: list[int] = needed.nonzero()[0].tolist()
        return indices

    def _sample_on_host(
        self, packed: PackedStep, rows: Sequence[int], logits: Tensor, masks: Future[TokenMasks] | None
    ) -> dict[int, SampledTokens]:
        """The tokens of these chunks, by index; also set as their last tokens on the device."""
        chunks = [packed.chunks[index] for index in rows]
        ends = np.cumsum([chunk.num_scored for chunk in packed.chunks])[rows].tolist()
        scored = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_scored, end)]
        sampled = self._sample(chunks, logits[sent(scored, self.device)].float(), masks)
        tokens: list[SampledTokens] = []
        start = 0
        for accepted in sampled.accepted:
            kept = slice(start, start + 1 + accepted)
            tokens.append(SampledTokens(sampled.tokens[kept], sampled.logprobs[kept]))
            start = kept.stop
        slots = sent(packed.slots[rows].tolist(), self.device)
        self.slots.last_token[slots] = sent([each.tokens[-1] for each in tokens], self.device, torch.int32)
        return dict(zip(rows, tokens, strict=True))

    def _read_prompts(self, plan: StepPlan, packed: PackedStep, step: ComputedStep) -> PromptOutputs:
        assert step.output is not None
        first_rows = packed.first_rows.tolist()
        rows = [
            first + position - chunk.start
            for first, chunk in zip(first_rows, plan.chunks, strict=True)
            for position in chunk.read
        ]
        with kernels_for(tuned=False):  # the number of rows varies, and no request waits for a compilation
            return self.prompt_reader.read(plan.chunks, step.output.hidden.last[sent(rows, self.device)])

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.slots.release(request_id)

    # ---- before the first step, and between steps -------------------------------------------------------------------

    def prepare(self) -> bool:
        passes = self.drafter.graphs
        return self.preparation.prepare_next() or (passes is not None and passes.prepare_next())

    def capture_decodes(self, sizes: Sequence[int] | None = None) -> None:
        self.preparation.capture_decodes(sizes or self.shapes.decode_buckets)
        if self.drafter.graphs is not None:
            self.drafter.graphs.capture_all(self.drafter.graphs.likely)

    def capture_missed(self) -> None:
        self.preparation.capture_missed()
        if self.drafter.graphs is not None:
            self.drafter.graphs.capture_all(self.drafter.graphs.missed)

    def warm_up(self) -> None:
        """Compile and load the kernels that serve all steps; start to compile those of the first steps."""
        self.preparation.compile_generic()
        self.preparation.compile_first()
        request = Request("warm-up", [0] * 2, SamplingParams(temperature=0.0), max_new_tokens=2, arrival=0.0)
        request.status = Status.RUNNING
        for start, count in ((0, 2), (2, 1)):
            table = [self.storage.scratch_block] * (start + count)
            beside = (table,) * (self.storage.num_tables - 1)
            self.run(StepPlan(step=0, chunks=(Chunk(request, start, count, table, samples=True, beside=beside),)))
            request.append(0)
        if self.drafter.reads_rows:  # it is two tokens behind: one pass is over a chunk, and one over a single token
            self.preparation.kernels.wait_for_walk(lambda: self.drafter.warm_up(request))
        self._warm_up_drafter(request)
        self.forget(request.id)

    @torch.inference_mode()
    def measure_largest_step(self) -> int:
        """Bytes that the largest possible step takes beside weights and cache.

        It is computed for padding, without single tokens, which would add nothing but the time to compile their kernel.
        What the host samples is calculated. The kernels should be compiled (`StepPreparation.compile_generic`), or they
        are one by one.
        """
        largest = self.largest_shape
        tiles = min(largest.tokens // self.tile_queries + largest.chunks, largest.tiles)  # There can be no more.
        shape = replace(largest, singles=0, tiles=tiles)

        def compute() -> None:
            with kernels_for(tuned=False):
                step = self.preparation.forward_padding(shape)
            if step.output is not None:
                self._draft_after_padding(step.output)

        taken = memory_taken(compute, self.device)
        return taken + HOST_COPIES * largest.samples * self.model.vocab_size * 4

    def _draft_after_padding(self, output: ModelOutput) -> None:
        """Let the drafter read a step of padding as a prompt: what that takes is part of the step's memory."""
        count = len(output.batch.tokens)
        request = Request("padding", [0] * count, SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunk = Chunk(request, start=0, count=count, table=[], samples=False)
        self.drafter.after(_computed(StepPlan(step=0, chunks=(chunk,)), [0], output))
        self.drafter.forget(request.id)


def _computed(
    plan: StepPlan, first_rows: Sequence[int], output: ModelOutput, launched: LaunchedStep | None = None
) -> ComputedBatch:
    """What a drafter reads of a step; it waits for the result only if the step has drafts."""
    read = dict[str, int] if launched is None else lambda: launched.result().accepted
    return ComputedBatch(plan, output.batch, first_rows, output.attention, output.hidden, read)

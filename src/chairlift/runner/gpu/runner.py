"""Plan -> tokens on a GPU that never waits for Python.

What a request needs from step to step lives on the device: its block table and its last token. A step sends one
small buffer, replays one captured graph that ends with the sampled tokens, and copies those back in the background.
The next step can be queued before they arrive, because it finds the tokens on the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.base import AttentionLayer, PagedBatch
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.executor import ExecutorCapabilities
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.models.base import CausalLM
from chairlift.runner.base import ModelRunner
from chairlift.runner.device_memory import memory_taken
from chairlift.runner.gpu.batch import BatchShape, Shapes, fill_with_nobody, round_up
from chairlift.runner.gpu.graphs import Graphs, can_capture, has_room
from chairlift.runner.gpu.packing import Packed, Packer
from chairlift.runner.gpu.slots import Slots
from chairlift.runner.gpu.staging import Staging
from chairlift.runner.gpu.step import Chosen, ComputedStep, LaunchedStep, Seen
from chairlift.runner.host_blocks import HostBlocks, make_copies
from chairlift.sampling.beam_candidates import beam_candidates
from chairlift.speculation.network_proposer import NetworkProposer
from chairlift.speculation.networks import ComputedBatch
from chairlift.structured.output import MaskJob, StructuredOutput

HOST_COPIES = 4  # float32 scores of a row that the host samples: as they came, edited, as probabilities and their logs
STEPS_AHEAD = 1
STAGING_BUFFERS = STEPS_AHEAD + 2  # one being filled, and those of the steps in flight


class GPURunner(ModelRunner):
    """An executor whose steps can be queued one ahead."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        storage: KVStorage,
        *,
        max_batch_requests: int,
        max_batch_tokens: int,
        max_model_len: int,
        graphs: bool = True,
        structured: StructuredOutput | None = None,
        drafter: NetworkProposer | None = None,
        host_blocks: HostBlocks | None = None,
        max_drafts: int = 0,
        draft_layers: Sequence[AttentionLayer] = (),
        step_bytes: int = 0,
    ) -> None:
        """`max_drafts`: of all requests of a step together. `draft_layers`: those of the draft network. `step_bytes`:
        what the largest step takes beside weights and cache, which graphs must leave free."""
        super().__init__(model, attention, storage, structured=structured, drafter=drafter, host_blocks=host_blocks)
        self.max_batch_requests = max_batch_requests
        self.max_drafts = max_drafts
        self.device = model.device
        self.slots = Slots(max_batch_requests, -(-max_model_len // storage.block_size), storage.block_size)
        spec = attention.batch_spec((*model.attention_layers, *draft_layers), model.dtype)
        self.tile_queries = spec.tile_queries
        self.tables = self._zeros(self.slots.count + 1, self.slots.table_width)
        self.last_token = self._zeros(self.slots.count + 1)
        use_graphs = graphs and can_capture(self.device)
        self.shapes = Shapes(
            *(max_batch_requests, max_batch_requests + max_drafts, self.tile_queries),
            graphs=use_graphs,
            long_context=spec.long_context if max_model_len > spec.long_context else None,
            splits_more=spec.splits_more,
        )
        self.packer = Packer(self.slots, self.shapes, self.tables, self.tile_queries)
        self._largest = self.shapes.largest(max_batch_tokens)
        self._inputs = self._zeros(self._largest.size)
        self._staging = [Staging(self._largest, self.device) for _ in range(STAGING_BUFFERS)]
        self._num_steps = 0
        self._compiled: set[BatchShape] = set()
        self.graphs: Graphs | None = None
        if use_graphs:
            likely = self.shapes.all_decodes(
                [size for size in self.shapes.decode_buckets if size <= 2 * max_batch_requests]
            )
            room = partial(has_room, self.device, step_bytes)
            self.graphs = Graphs(self._prepare, self._forward, likely, room)

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=self.device)

    # ---- a step ---------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(STEPS_AHEAD, beam_search=True, max_drafts=self.max_drafts)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step; its result may be asked for later."""
        begun = time.perf_counter()
        make_copies(plan, self.storage, self.host_blocks)
        staging = self._staging[self._num_steps % STAGING_BUFFERS]
        self._num_steps += 1
        packed = self.packer.pack(plan, staging)
        graphs = self.graphs if packed.capturable else None
        typical = graphs is None or graphs.is_typical(packed.shape)
        graph = None if graphs is None else graphs.find(packed.shape)
        size = packed.shape.size
        self._inputs[:size].copy_(staging.inputs[:size], non_blocking=True)
        staging.started.record()
        by_host = self._by_host(packed)
        masks = self._begin_masks(packed, by_host)  # computed while the device computes the logits
        step = self._forward(packed.shape) if graph is None else graph.replay()
        candidates = beam_candidates(packed.chunks, step.logits, one_by_one=self.one_by_one)
        chosen = self._sample_on_host(packed, by_host, step.logits, masks) if by_host else {}
        staging.tokens[: packed.shape.samples].copy_(step.tokens, non_blocking=True)
        staging.finished.record()
        pending = LaunchedStep(plan, packed, staging, chosen, candidates, time.perf_counter() - begun, typical)
        if self.drafter is not None:
            self._show_drafter(self.drafter, pending, step)
        return pending

    def _forward(self, shape: BatchShape) -> ComputedStep:
        """The whole step as kernels, reading nothing but device memory: what a graph captures."""
        from chairlift.kernels.triton.launch import picked_rows
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.sampling import sample

        view = shape.device_views(self._inputs)
        tokens = begin_step(
            view["token"], view["slot"], self.last_token, view["update_cell"], view["update_block"], self.tables
        )
        attend = self.attention.attend(self._paged_batch(shape, view), self.storage)
        rows = view["sample_row"]
        if self.drafter is None:
            seen, kept = None, self.model.hidden_states(tokens, view["position"], attend, rows).last
        else:
            seen = Seen(tokens, self.model.hidden_states(tokens, view["position"], attend))
            kept = picked_rows(seen.hidden.last, rows)
        logits = self.model.logits(kept)
        sampled = torch.empty(shape.samples, dtype=torch.int32, device=self.device)
        sample(
            logits,
            tokens=sampled,
            last_token=self.last_token,
            slots=view["sample_slot"],
            temperature=view["temperature"],
            top_k=view["top_k"],
            top_p=view["top_p"],
            min_p=view["min_p"],
            uniforms=view["uniform"],
        )
        return ComputedStep(logits, sampled, seen)

    def _paged_batch(self, shape: BatchShape, view: dict[str, Tensor]) -> PagedBatch:
        return PagedBatch(
            slots=view["slot"],
            positions=view["position"],
            tables=self.tables,
            chunk_slot=view["chunk_slot"],
            chunk_row=view["chunk_row"],
            chunk_start=view["chunk_start"],
            chunk_count=view["chunk_count"],
            num_single=shape.singles,
            tile_chunk=view["tile_chunk"],
            tile_offset=view["tile_offset"],
            tile_queries=self.tile_queries,
            one_per_request=self.max_drafts == 0,
            long_contexts=shape.long,
            deep_chunks=shape.deep,
        )

    # ---- sampling that needs the host -----------------------------------------------------------------------------

    def _by_host(self, packed: Packed) -> list[int]:
        """Which of the chunks that sample need the host."""
        wanted = self.slots.by_host[packed.slots]
        if self.drafter is not None:
            wanted |= np.array([self._drawn_from(chunk) is not None for chunk in packed.chunks], np.bool_)
        found: list[int] = wanted.nonzero()[0].tolist()
        return found

    def _drawn_from(self, chunk: Chunk) -> Tensor | None:
        return self.drafter.drawn_from(chunk.request.id) if self.drafter is not None and chunk.drafts else None

    def _begin_masks(self, packed: Packed, by_host: Sequence[int]) -> MaskJob | None:
        if self.structured is None:
            return None
        chunks = [packed.chunks[index] for index in by_host]
        return self.structured.begin_masks([chunk.request for chunk in chunks], [chunk.drafts for chunk in chunks])

    def _sample_on_host(
        self, packed: Packed, by_host: Sequence[int], logits: Tensor, masks: MaskJob | None
    ) -> dict[int, Chosen]:
        """Grammars, penalties, biases, bans, logprobs, and drafts that were drawn: choose the tokens of those chunks
        again, and tell the device."""
        chunks = [packed.chunks[index] for index in by_host]
        for chunk in chunks:
            self.sampler.follow(chunk.request)
        ends = np.cumsum([chunk.num_scored for chunk in packed.chunks])[by_host].tolist()
        rows = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_scored, end)]
        sampled = self.sampler.sample(
            logits[sent(rows, self.device)].float(),
            [chunk.request.id for chunk in chunks],
            [chunk.known_end - chunk.request.num_prompt for chunk in chunks],
            masks.wait() if masks else None,
            [chunk.drafts for chunk in chunks],
            [self._drawn_from(chunk) for chunk in chunks],
        )
        chosen, at = [], 0
        for accepted in sampled.accepted:
            kept = slice(at, at + 1 + accepted)
            chosen.append(Chosen(sampled.tokens[kept], sampled.logprobs[kept]))
            at = kept.stop
        slots = sent(packed.slots[by_host].tolist(), self.device)
        self.last_token[slots] = sent([one.tokens[-1] for one in chosen], self.device, torch.int32)
        return dict(zip(by_host, chosen, strict=True))

    # ---- the network that guesses, if there is one ------------------------------------------------------------------

    def _show_drafter(self, drafter: NetworkProposer, pending: LaunchedStep, step: ComputedStep) -> None:
        """What it is shown is overwritten by the next step, so a step with drafts is waited for here."""
        plan, packed = pending.plan, pending.packed
        accepted = pending.result().accepted if plan.num_drafts else {}
        order = np.argsort(packed.first_rows).tolist()
        plan = replace(plan, chunks=tuple(plan.chunks[index] for index in order))
        self._show(drafter, plan, packed.first_rows[order].tolist(), packed.shape, step, accepted)

    def _show(
        self,
        drafter: NetworkProposer,
        plan: StepPlan,
        offsets: Sequence[int],
        shape: BatchShape,
        step: ComputedStep,
        accepted: Mapping[str, int],
    ) -> None:
        """`offsets`: the first row of each chunk, in this order."""
        assert step.seen is not None
        view = shape.device_views(self._inputs)
        attend = self.attention.attend(self._paged_batch(shape, view), self.storage)
        batch = step.seen.batch(plan, offsets, view)
        drafter.network.follow(ComputedBatch(plan, batch, attend, step.seen.hidden, accepted, self.storage))

    def _show_prompt_of_nobody(self, drafter: NetworkProposer, shape: BatchShape, step: ComputedStep) -> None:
        request = Request("rehearsal", [0] * shape.tokens, SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunk = Chunk(request, start=0, count=shape.tokens, table=[], samples=False)
        self._show(drafter, StepPlan(step=0, chunks=(chunk,)), [0], shape, step, {})
        drafter.forget(request.id)

    # ---- graphs ---------------------------------------------------------------------------------------------------

    def _forward_nobody(self, shape: BatchShape) -> ComputedStep:
        nobody = np.zeros(shape.size, np.int32)
        fill_with_nobody(shape.host_views(nobody), self.slots.idle_cell)
        self._inputs[: shape.size].copy_(torch.from_numpy(nobody))
        return self._forward(shape)

    def _prepare(self, shape: BatchShape) -> int:
        """Compute such a step for nobody; return the bytes that it takes beside weights and cache."""
        return memory_taken(lambda: self._forward_nobody(shape), self.device)

    @torch.inference_mode()
    def measure_largest_step(self) -> int:
        """The bytes of the largest step there can be, which is computed for nobody. Single tokens would add nothing to
        that but the time to compile their kernel. What a network that guesses makes of it is computed, too. What the
        host samples is not but counted, and so is what that network keeps from step to step."""
        self._compile(self._first_shapes())
        largest = self._largest
        tiles = min(largest.tokens // self.tile_queries + largest.chunks, largest.tiles)  # as many as there can be
        shape = replace(largest, singles=0, tiles=tiles)
        drafter = self.drafter

        def compute() -> None:
            step = self._forward_nobody(shape)
            if drafter is not None:
                self._show_prompt_of_nobody(drafter, shape, step)

        kept = (
            0
            if drafter is None
            else drafter.network.bytes_kept(
                round_up(self.max_batch_requests, self.shapes.decode_buckets) or self.max_batch_requests
            )
        )
        taken = memory_taken(compute, self.device)
        return taken + kept + HOST_COPIES * largest.samples * self.model.vocab_size * 4

    def warm_up(self) -> None:
        """Compile and load the kernels of all kinds of steps, so that the first request does not wait for it."""
        self._compile(self._first_shapes())
        request = Request("warm-up", [0] * 2, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
        scratch = [self.storage.scratch_block]
        for start, count in ((0, 2), (1, 1)):
            chunk = Chunk(request, start=start, count=count, table=scratch, samples=True)
            self.run(StepPlan(step=0, chunks=(chunk,)))
        self.forget(request.id)
        if self.drafter is not None:
            self.drafter.warm_up(request)
            self.drafter.forget(request.id)

    def _first_shapes(self) -> list[BatchShape]:
        """A short prompt, a single token, and one beside a longer prompt: all kernels that the first requests need."""
        one = {"chunks": 1, "samples": 1, "updates": 1}
        mixed, _ = self.shapes.choose(tokens=2, singles=0, tiles=1, **one)
        single, _ = self.shapes.choose(tokens=1, singles=1, tiles=0, **one)
        return [mixed, single, *self.shapes.beside_prompts(single)]

    @torch.inference_mode()
    def _compile(self, shapes: Sequence[BatchShape]) -> None:
        """The kernels of such steps, side by side instead of when each is first launched."""
        missing = self._uncompiled(shapes)
        self._compiled.update(missing)
        if self.device.type != "cuda" or not missing:
            return
        from chairlift.kernels.triton.compile import compile_kernels
        from chairlift.kernels.triton.layers import begin_step_kernel

        def walk() -> None:
            for shape in missing:
                self._forward_nobody(shape)

        # Tokens are looked up in the embedding: they have to be some.
        compile_kernels(walk, self.device, launched=[begin_step_kernel])

    def _uncompiled(self, shapes: Sequence[BatchShape]) -> list[BatchShape]:
        return [shape for shape in dict.fromkeys(shapes) if shape not in self._compiled]

    def prepare(self) -> bool:
        """Capture a step that is likely to come or, once all are, compile what single tokens need beside prompts: the
        first of them would wait for it. False if there is nothing left; without graphs there never is anything."""
        if self.graphs is None:
            return False
        if self.graphs.capture_next():
            return True
        missing = self._uncompiled(self._beside_prompts(self.graphs.likely))
        self._compile(missing[:1])
        return bool(missing)

    def _beside_prompts(self, decodes: Sequence[BatchShape]) -> list[BatchShape]:
        return [*chain.from_iterable(map(self.shapes.beside_prompts, decodes))]

    def capture_decodes(self, sizes: Sequence[int] | None = None) -> None:
        """Capture decode steps of these batch sizes now instead of when they first occur."""
        if self.graphs is not None:
            shapes = self.shapes.all_decodes(sorted(sizes or self.shapes.decode_buckets, reverse=True))
            self._compile([*shapes, *self._beside_prompts(shapes)])
            for shape in shapes:
                self.graphs.capture(shape)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.slots.release(request_id)

"""The runner of a GPU, which never waits for Python.

What a request needs from step to step lives on the device: its block table and its last token. A step sends one
small buffer, replays one captured graph that ends with the sampled tokens, and copies those back in the background.
The next step can be queued before they arrive, because it finds the tokens on the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import PagedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.paged.slots import Slots
from chairlift.attention.recurrent import StateStorage
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.executor import ExecutorCapabilities
from chairlift.core.plan import NO_PROMPT_OUTPUTS, Chunk, PromptOutputs, StepPlan
from chairlift.core.request import Request, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.graphs import can_capture, has_room, kernels_for, memory_taken
from chairlift.models.base import CausalLM
from chairlift.runner.base import ModelRunner
from chairlift.runner.gpu.draft_observer import DraftObserver
from chairlift.runner.gpu.draft_passes import DraftPasses
from chairlift.runner.gpu.packing import PackedStep, Packer
from chairlift.runner.gpu.preparation import StepPreparation
from chairlift.runner.gpu.recent_states import RecentStates
from chairlift.runner.gpu.shapes import BatchShape, RecurrentInputs, Shapes, Staging, round_up
from chairlift.runner.gpu.step import ComputedStep, HostSampling, LaunchedStep, ModelOutput
from chairlift.runner.memory import HostBlocks, make_copies
from chairlift.sampling.sampler import beam_candidates
from chairlift.speculation.draft_head import HeadNetwork
from chairlift.speculation.draft_network import ModelProposer
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.structured.output import StructuredOutput

STEPS_AHEAD = 1
STAGING_BUFFERS = STEPS_AHEAD + 2  # one being filled, and those of the steps in flight
HOST_COPIES = 4  # float32 copies of a row that the host samples: logits, edited logits, probabilities and their logs


class GPURunner(ModelRunner):
    """Queues steps on the device, one ahead of the last result that was read."""

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
        draft_graphs: bool = False,
        structured: StructuredOutput | None = None,
        drafter: ModelProposer | None = None,
        host_blocks: HostBlocks | None = None,
        states: StateStorage | None = None,
        max_drafts: int = 0,
        drafts_per_request: int = 0,
        draft_layers: Sequence[AttentionLayer] = (),
        step_bytes: int = 0,
    ) -> None:
        """`max_drafts`: of all requests of a step together; `drafts_per_request`: of each. `draft_layers`: those of the
        draft network, whose passes are captured with `draft_graphs`. `step_bytes`: what the largest step takes beside
        weights and cache, which graphs must leave free."""
        super().__init__(
            model,
            attention,
            storage,
            structured=structured,
            drafter=drafter,
            host_blocks=host_blocks,
            states=states,
        )
        self.max_batch_requests = max_batch_requests
        self.max_drafts = max_drafts
        self.device = model.device
        spec = attention.batch_spec((*model.attention_layers, *draft_layers), model.dtype)
        self.tile_queries = spec.tile_queries
        self.slots = Slots(max_batch_requests, -(-max_model_len // storage.block_size), storage.block_size)
        self.tables = self._zeros(self.slots.count + 1, self.slots.table_width)
        self.last_token = self._zeros(self.slots.count + 1)
        use_graphs = graphs and can_capture(self.device) and getattr(model, "allows_capture", True)
        self.shapes = Shapes(
            max_batch_requests,
            max_batch_requests + max_drafts,
            self.tile_queries,
            graphs=use_graphs,
            long_context=spec.long_context if max_model_len > spec.long_context else None,
            splits_more=spec.splits_more,
        )
        self.largest_shape = self.shapes.largest(max_batch_tokens)
        self._inputs = self._zeros(self.largest_shape.size)
        self._staging = [Staging(self.largest_shape, self.device) for _ in range(STAGING_BUFFERS)]
        self._num_steps = 0
        self._recent = self._keep_states()
        self._packer = Packer(self.slots, self.shapes, self.tables, self.tile_queries, self._recent)
        self._host_sampling = HostSampling(self.slots, self.sampler, self.last_token, structured, drafter)
        self.draft_observer: DraftObserver | None = None
        if drafter is not None and self._recent is None:
            self.draft_observer = DraftObserver(drafter, storage)
        self._recurrent: RecurrentInputs | None = None
        if states is not None:
            largest, rows = self.largest_shape, 1 + drafts_per_request
            self._recurrent = RecurrentInputs(states, largest, self.device, STAGING_BUFFERS, longest_decode=rows)
        self.preparation = StepPreparation(
            self._forward,
            self._inputs,
            self.shapes,
            self.slots.padding_cell,
            use_graphs=use_graphs,
            step_bytes=step_bytes,
            recurrent=self._recurrent,
        )
        if isinstance(drafter, DraftModelProposer):  # the rows of its passes vary: none waits for a compilation
            drafter.launching = partial(kernels_for, tuned=False)
        self.draft_passes: DraftPasses | None = None
        if use_graphs and draft_graphs:
            self.draft_passes = self._capture_drafts(drafts_per_request, step_bytes)

    def _keep_states(self) -> RecentStates | None:
        """Let steps keep their states on the device if a draft head reads them."""
        drafter = self.drafter
        if not isinstance(drafter, DraftModelProposer) or not isinstance(drafter.network, HeadNetwork):
            return None
        drafter.network.states = recent = RecentStates(drafter.network, self.slots, self.model.dtype, self.device)
        return recent

    def _capture_drafts(self, drafts_per_request: int, step_bytes: int) -> DraftPasses | None:
        """Let the drafter replay its passes, if it has a network that runs on this attention."""
        drafter = self.drafter
        if not isinstance(drafter, DraftModelProposer):
            return None
        drafter.captured = DraftPasses(
            drafter.network,
            self.attention,
            self.storage,
            self.slots,
            self.tables,
            self.last_token,
            recent=self._recent,
            max_requests=self.max_batch_requests,
            places=min(drafts_per_request, drafter.max_length),
            has_room=lambda taken: has_room(self.device, step_bytes, taken),
        )
        return drafter.captured

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=self.device)

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(
            STEPS_AHEAD, beam_search=True, hidden_size=self.model.hidden_size, max_drafts=self.max_drafts
        )

    # ---- a step ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        begun = time.perf_counter()
        make_copies(plan, self.storage, self.host_blocks)
        buffer = self._num_steps % STAGING_BUFFERS
        staging = self._staging[buffer]
        self._num_steps += 1
        packed = self._packer.pack(plan, staging)
        if self._recent is not None:
            self._recent.note(plan, computes_prompts=bool(packed.shape.tiles))
        reads = plan.reads
        # Captured steps keep the hidden states of all rows only for a draft network.
        capturable = packed.capturable and (not reads or self._keeps_all_rows)
        graphs = self.preparation.graphs if capturable else None
        typical = graphs is None or graphs.is_typical(packed.shape)
        graph = None if graphs is None else graphs.find(packed.shape)
        tuned = graph is not None or self.preparation.is_ready(packed.shape, capturable=packed.capturable)
        size = packed.shape.size
        self._inputs[:size].copy_(staging.inputs[:size], non_blocking=True)
        if self._recurrent is not None:
            self._recurrent.send(plan, packed.shape, packed.first_rows, buffer)
        staging.started.record()
        on_host = self._host_sampling.rows(packed)
        masks = self._host_sampling.begin_masks(packed, on_host)
        if graph is None:
            with kernels_for(tuned=tuned):
                step = self._forward(packed.shape, all_rows=reads)
        else:
            step = graph.replay()
        candidates = beam_candidates(packed.chunks, step.logits, one_by_one=self.one_by_one)
        from_host = self._host_sampling.sample(packed, on_host, step.logits, masks)
        staging.tokens[: packed.shape.samples].copy_(step.tokens, non_blocking=True)
        staging.finished.record()
        prompts = self._read_prompts(plan, packed, step) if reads else NO_PROMPT_OUTPUTS
        seconds = time.perf_counter() - begun
        launched = LaunchedStep(plan, packed, staging, from_host, candidates, prompts, seconds, typical and tuned)
        if self.draft_observer is not None:
            self.draft_observer.observe(launched, step)
        return launched

    @property
    def _keeps_all_rows(self) -> bool:
        """Whether every step has the hidden states of all rows, for a draft network."""
        return self.draft_observer is not None or self._recent is not None

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

    def _forward(self, shape: BatchShape, *, all_rows: bool = False) -> ComputedStep:
        """The whole step as kernels that read nothing but device memory: what a graph captures.

        With `all_rows`, or a draft network, the result has the hidden states of all rows.
        """
        from chairlift.kernels.triton.launch import picked_rows
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.sampling import sample

        view = shape.device_views(self._inputs)
        tokens = begin_step(
            view["token"], view["slot"], self.last_token, view["update_cell"], view["update_block"], self.tables
        )
        batch, rows = self._batch(shape, view, tokens), view["sample_row"]
        attention = self.attention.begin(batch, self.storage)
        if not self._keeps_all_rows and not all_rows:
            output, kept = None, self.model.hidden_states(batch, attention, rows).last
        else:
            hidden = self.model.hidden_states(batch, attention)
            output = ModelOutput(batch, attention, hidden)
            if self._recent is not None:
                self._recent.store(batch, view, attention, hidden)
            kept = picked_rows(output.hidden.last, rows)
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
        return ComputedStep(logits, sampled, output)

    def _batch(self, shape: BatchShape, view: dict[str, Tensor], tokens: Tensor) -> StepBatch:
        """The batch of a step of this shape, whose inputs `view` lie on the device."""
        layout = PagedLayout(
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
            one_per_request=not shape.drafts,
            long_contexts=shape.long,
            deep_chunks=shape.deep,
        )
        recurrent = None if self._recurrent is None else self._recurrent.step(shape)
        rows = view["sample_row"]
        return StepBatch(tokens, view["position"], paged=layout, sampled_rows=rows, recurrent=recurrent)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.slots.release(request_id)

    # ---- before the first step, and between steps -------------------------------------------------------------------

    def prepare(self) -> bool:
        return self.preparation.prepare_next() or (self.draft_passes is not None and self.draft_passes.prepare_next())

    def capture_decodes(self, sizes: Sequence[int] | None = None) -> None:
        self.preparation.capture_decodes(sizes or self.shapes.decode_buckets)
        if self.draft_passes is not None:
            self.draft_passes.capture_all()

    def capture_missed(self) -> None:
        self.preparation.capture_missed()
        if self.draft_passes is not None:
            self.draft_passes.capture_missed()

    def warm_up(self) -> None:
        """Compile and load the kernels that serve all steps; start to compile those of the first steps."""
        self.preparation.compile_generic()
        self.preparation.compile_first()
        request = Request("warm-up", [0] * 2, SamplingParams(temperature=0.0), max_new_tokens=2, arrival=0.0)
        request.status = Status.RUNNING
        for start, count in ((0, 2), (2, 1)):
            table = [self.storage.scratch_block] * (start + count)
            self.run(StepPlan(step=0, chunks=(Chunk(request, start=start, count=count, table=table, samples=True),)))
            request.append(0)
        drafter = self.drafter
        if drafter is not None:  # it is two tokens behind: one pass is over a chunk, and one over a single token
            self.preparation.kernels.wait_for_walk(lambda: drafter.warm_up(request))
        self._warm_up_drafter(request)
        self.forget(request.id)

    @torch.inference_mode()
    def measure_largest_step(self) -> int:
        """Bytes that the largest possible step takes beside weights and cache.

        It is computed for padding, without single tokens, which would add nothing but the time to compile their kernel.
        What the host samples, and what a draft network keeps from step to step, is calculated. Its kernels should be
        compiled (`StepPreparation.compile_generic`), or they are one by one.
        """
        largest = self.largest_shape
        tiles = min(largest.tokens // self.tile_queries + largest.chunks, largest.tiles)  # as many as there can be
        shape = replace(largest, singles=0, tiles=tiles)

        def compute() -> None:
            with kernels_for(tuned=False):
                step = self.preparation.forward_padding(shape)
            if self.draft_observer is not None:
                self.draft_observer.observe_padding(step)

        taken = memory_taken(compute, self.device)
        return taken + self._bytes_kept() + HOST_COPIES * largest.samples * self.model.vocab_size * 4

    def num_state_bytes(self) -> int:
        """Memory that the states which a draft head reads take from the start."""
        return 0 if self._recent is None else self._recent.num_bytes(self.max_batch_requests)

    def release(self) -> None:
        """Free the states for a draft head: the runner was only made to measure a step."""
        if self._recent is not None:
            self._recent.release()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _bytes_kept(self) -> int:
        if self.draft_observer is None:
            return 0
        requests = round_up(self.max_batch_requests, self.shapes.decode_buckets) or self.max_batch_requests
        return self.draft_observer.bytes_kept(requests)

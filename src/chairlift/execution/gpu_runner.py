"""Plan -> tokens on a GPU that never waits for Python.

What a request needs from step to step lives on the device: its block table and its last token. A step sends one
small buffer, replays one captured graph that ends with the sampled tokens, and copies those back in the background.
The next step can be queued before they arrive, because it finds the tokens on the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chairlift.attention import KVStorage, PagedBatch, PagedGPUAttention
from chairlift.core.beam_search import Candidates
from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.plan import Chunk, StepPlan, StepResult, StepTiming
from chairlift.core.randomness import uniform
from chairlift.core.request import Request
from chairlift.core.sampling import SamplingParams
from chairlift.execution.gpu_batch import BatchShape, decode_buckets, fill_with_nobody, round_up
from chairlift.execution.gpu_slots import Slots
from chairlift.execution.host_blocks import HostBlocks, make_copies
from chairlift.execution.sampler import Sampler
from chairlift.execution.sampler_beams import beam_candidates
from chairlift.execution.structured import MaskJob, StructuredOutput
from chairlift.models.base import CausalLM

STAGING_BUFFERS = 3  # one being filled, and those of the steps that may be under way
MIXED_BUCKETS = [128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]  # tokens; longer steps run eagerly
SPARE_TILES = 16  # longer chunks that a captured mixed step may hold


class GPURunner:
    """An executor whose steps can be queued one ahead."""

    steps_ahead = 1
    finds_candidates = True

    def __init__(
        self,
        model: CausalLM,
        attention: PagedGPUAttention,
        storage: KVStorage,
        *,
        seats: int,
        max_batch_tokens: int,
        max_model_len: int,
        graphs: bool = True,
        structured: StructuredOutput | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.storage = storage
        self.structured = structured
        self.seats = seats
        self.device = model.device
        self.host: HostBlocks | None = None  # where preempted requests leave their blocks, if anywhere
        self.one_by_one = bool(getattr(model, "batch_invariant", False))  # rows are sampled
        self.sampler = Sampler(model.vocab_size, model.device, one_by_one=self.one_by_one)
        self.slots = Slots(seats, -(-max_model_len // storage.block_size))
        self.tile_queries = attention.tile_queries(model.attention_layers, model.dtype)
        self.tables = self._zeros(self.slots.count + 1, self.slots.table_width)
        self.last_token = self._zeros(self.slots.count + 1)
        self.graphs = graphs and self.device.type == "cuda"
        self._decode_buckets = decode_buckets(seats)
        most_tokens = max(max_batch_tokens + seats, MIXED_BUCKETS[-1])
        largest = BatchShape(most_tokens, seats, seats, most_tokens + SPARE_TILES, seats, 4 * seats)
        self._inputs = self._zeros(largest.size)
        self._staging = [_Staging(largest.size, seats, self.device) for _ in range(STAGING_BUFFERS)]
        self._num_steps = 0
        self._captured: dict[BatchShape, _Graph] = {}
        self._pool: Any = None

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=self.device)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue a step; its result may be asked for later."""
        begun = time.perf_counter()
        make_copies(plan, self.storage, self.host)
        staging = self._staging[self._num_steps % STAGING_BUFFERS]
        self._num_steps += 1
        packed = self._pack(plan, staging)
        shape = packed.shape
        self._inputs[: shape.size].copy_(staging.inputs[: shape.size], non_blocking=True)
        staging.started.record()
        masks = self._begin_masks(packed)  # computed while the device computes the logits
        graph = self._graph(shape, staging) if packed.capturable else None
        if graph is None:
            logits, tokens = self._forward(shape)
        else:
            graph.replay()
            logits, tokens = graph.logits, graph.tokens
        candidates = beam_candidates(packed.chunks, logits, one_by_one=self.one_by_one)
        logprobs = self._sample_on_host(packed, logits, tokens, masks)
        staging.tokens[: shape.samples].copy_(tokens, non_blocking=True)
        staging.finished.record()
        return PendingStep(plan, packed, staging, logprobs, candidates, time.perf_counter() - begun)

    def _forward(self, shape: BatchShape) -> tuple[Tensor, Tensor]:
        """The whole step as kernels, reading nothing but device memory: what a graph captures."""
        from chairlift.kernels.triton_layers import begin_step
        from chairlift.kernels.triton_sampling import sample

        view = shape.device_views(self._inputs)
        tokens = begin_step(
            view["token"], view["slot"], self.last_token, view["update_cell"], view["update_block"], self.tables
        )
        batch = PagedBatch(
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
        )
        hidden = self.model.hidden_states(tokens, view["position"], self.attention.attend(batch, self.storage))
        logits = self.model.logits(hidden[view["sample_row"]])
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
        return logits, sampled

    # ---- packing --------------------------------------------------------------------------------------------------

    def _pack(self, plan: StepPlan, staging: _Staging) -> _Packed:
        """Write the step into the staging buffer: single tokens first, then the longer chunks."""
        # Longest contexts first: when the device runs out of rows, only short ones are left to wait for.
        singles = sorted((chunk for chunk in plan.chunks if chunk.count == 1), key=_start, reverse=True)
        chunks = singles + [chunk for chunk in plan.chunks if chunk.count > 1]
        slots = [self.slots.of(chunk) for chunk in chunks]
        cells: list[int] = []
        blocks: list[int] = []
        for slot, chunk in zip(slots, chunks, strict=True):
            self.slots.table_changes(slot, chunk, cells, blocks)
        tiles = [
            (index, at)
            for index, chunk in enumerate(chunks[len(singles) :], len(singles))
            for at in range(0, chunk.count, self.tile_queries)
        ]
        samples = [index for index, chunk in enumerate(chunks) if chunk.samples]
        num_tokens = plan.num_tokens + plan.idle_rows
        shape, capturable = self._shape(num_tokens, len(chunks), len(singles), len(tiles), len(samples), len(cells))
        if len(cells) > shape.updates:  # a long table at once, such as a prefix hit: sent ahead, by itself
            self._send_tables(cells, blocks)
            cells, blocks = [], []
        staging.wait()
        views = staging.views(shape)
        fill_with_nobody(views, self.slots.idle_cell)
        indices = np.array([slot.index for slot in slots], np.int32)
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        rows = np.cumsum(counts, dtype=np.int32) - counts
        total = plan.num_tokens
        owner = np.repeat(np.arange(len(chunks)), counts)
        views["slot"][:total] = indices[owner]
        views["position"][:total] = np.arange(total, dtype=np.int32) - rows[owner] + starts[owner]
        views["token"][:total] = _tokens(singles, chunks)
        for name, values in (("slot", indices), ("row", rows), ("start", starts), ("count", counts)):
            views[f"chunk_{name}"][: len(chunks)] = values
        if tiles:
            views["tile_chunk"][: len(tiles)], views["tile_offset"][: len(tiles)] = zip(*tiles, strict=True)
        if cells:
            views["update_cell"][: len(cells)] = cells
            views["update_block"][: len(cells)] = blocks
        if samples:
            self._pack_sampling(views, [chunks[index] for index in samples], indices[samples])
            views["sample_row"][: len(samples)] = (rows + counts - 1)[samples]
        return _Packed(shape, capturable, [chunks[index] for index in samples], indices[samples])

    def _pack_sampling(self, views: dict[str, np.ndarray], chunks: Sequence[Chunk], indices: np.ndarray) -> None:
        count = len(chunks)
        views["sample_slot"][:count] = indices
        temperature = self.slots.temperature[indices]
        if temperature.any():
            views["temperature"][:count] = temperature
            views["top_k"][:count] = self.slots.top_k[indices]
            views["top_p"][:count] = self.slots.top_p[indices]
            views["min_p"][:count] = self.slots.min_p[indices]
            views["uniform"][:count] = [
                uniform(chunk.request.seed, chunk.end - chunk.request.num_prompt) for chunk in chunks
            ]

    def _shape(
        self, tokens: int, chunks: int, singles: int, tiles: int, samples: int, updates: int
    ) -> tuple[BatchShape, bool]:
        """The shape that carries this batch, and whether it is one that recurs, so that a graph of it pays."""
        if not self.graphs:
            return self._exact_shape(tokens, chunks, singles, tiles, samples, updates), False
        if not tiles:
            size = round_up(tokens, self._decode_buckets)
            if size is not None:
                return BatchShape(size, size, size, 0, size, size), True
        bucket = round_up(tokens, MIXED_BUCKETS)
        if tiles and bucket is not None and chunks <= self.seats:
            most_tiles = bucket // self.tile_queries + SPARE_TILES
            if tiles <= most_tiles:
                seats = min(self.seats, bucket)
                if chunks <= seats:
                    return BatchShape(bucket, seats, seats, most_tiles, seats, 2 * seats), True
        return self._exact_shape(tokens, chunks, singles, tiles, samples, updates), False

    def _exact_shape(
        self, tokens: int, chunks: int, singles: int, tiles: int, samples: int, updates: int
    ) -> BatchShape:
        return BatchShape(tokens, chunks, singles, tiles, samples, min(updates, 4 * self.seats))

    def _send_tables(self, cells: Sequence[int], blocks: Sequence[int]) -> None:
        where, what = (torch.tensor(values, dtype=torch.int32, device=self.device) for values in (cells, blocks))
        self.tables.view(-1)[where] = what

    # ---- sampling that needs the host -----------------------------------------------------------------------------

    def _begin_masks(self, packed: _Packed) -> MaskJob | None:
        if self.structured is None:
            return None
        return self.structured.begin_masks([packed.chunks[row].request for row in packed.host_rows])

    def _sample_on_host(
        self, packed: _Packed, logits: Tensor, tokens: Tensor, masks: MaskJob | None
    ) -> dict[int, TokenLogprobs | None]:
        """Grammars, penalties, biases, bans and logprobs: choose those rows' tokens again, and tell the device."""
        rows = packed.host_rows
        if not rows:
            return {}
        chunks = [packed.chunks[row] for row in rows]
        for request in (chunk.request for chunk in chunks):
            self.sampler.follow(request)
        where = torch.tensor(rows, device=self.device)
        sampled = self.sampler.sample(
            logits[where].float(),
            [chunk.request.id for chunk in chunks],
            [chunk.end - chunk.request.num_prompt for chunk in chunks],
            masks.wait() if masks else None,
        )
        chosen = torch.tensor(sampled.tokens, dtype=torch.int32, device=self.device)
        tokens[where] = chosen
        self.last_token[torch.from_numpy(packed.slots[rows]).to(self.device)] = chosen
        return dict(zip(rows, sampled.logprobs, strict=True))

    # ---- graphs ---------------------------------------------------------------------------------------------------

    def _graph(self, shape: BatchShape, staging: _Staging) -> _Graph:
        graph = self._captured.get(shape)
        if graph is None:
            graph = self._capture(shape)
            self._inputs[: shape.size].copy_(staging.inputs[: shape.size], non_blocking=True)
        return graph

    def _capture(self, shape: BatchShape) -> _Graph:
        """Record the step's kernels for one shape. First run once for nobody: that compiles what is not compiled."""
        nobody = np.zeros(shape.size, np.int32)
        fill_with_nobody(shape.host_views(nobody), self.slots.idle_cell)
        self._inputs[: shape.size].copy_(torch.from_numpy(nobody))
        self._forward(shape)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = self._forward(shape)
        self._captured[shape] = _Graph(graph, logits, tokens)
        return self._captured[shape]

    def warm_up(self) -> None:
        """Compile the kernels of both kinds of steps, so that the first request does not wait for it."""
        request = Request("warm-up", [0] * 2, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
        scratch = [self.storage.scratch_block]
        for start, count in ((0, 2), (1, 1)):
            chunk = Chunk(request, start=start, count=count, table=scratch, samples=True)
            self.run(StepPlan(step=0, chunks=(chunk,)))
        self.forget(request.id)

    def capture_decodes(self, sizes: Sequence[int] | None = None) -> None:
        """Capture decode steps of these batch sizes now instead of when they first occur."""
        if self.graphs:
            with torch.inference_mode():
                for size in sorted(sizes or self._decode_buckets, reverse=True):
                    shape, _ = self._shape(size, size, size, 0, size, 0)
                    if shape not in self._captured:
                        self._capture(shape)

    def forget(self, request_id: str) -> None:
        self.slots.release(request_id)
        self.sampler.forget(request_id)


def _start(chunk: Chunk) -> int:
    return chunk.start


def needs_host(params: SamplingParams) -> bool:
    """Whether a request's tokens are chosen by the host's sampler."""
    plain = not params.has_penalties and params.logit_bias is None and params.logprobs is None
    return not plain or params.min_tokens > 0 or params.structure is not None


def _tokens(singles: Sequence[Chunk], chunks: Sequence[Chunk]) -> list[int]:
    """The input tokens; -1 where only the device knows the token yet."""
    tokens = [chunk.request.tokens[chunk.start] if chunk.start < chunk.request.num_known else -1 for chunk in singles]
    for chunk in chunks[len(singles) :]:
        tokens.extend(chunk.request.tokens[chunk.start : chunk.end])
    return tokens


@dataclass(frozen=True, slots=True)
class _Packed:
    shape: BatchShape
    capturable: bool
    chunks: list[Chunk]  # those that sample, in the order of their rows
    slots: np.ndarray  # theirs

    @property
    def host_rows(self) -> list[int]:
        return [row for row, chunk in enumerate(self.chunks) if needs_host(chunk.request.params)]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    logits: Tensor
    tokens: Tensor

    def replay(self) -> None:
        self.graph.replay()


class _Staging:
    """Host memory that one step passes through on its way to the device and back."""

    def __init__(self, size: int, seats: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.inputs = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.tokens = torch.zeros(seats, dtype=torch.int32, pin_memory=pinned)
        self._array = self.inputs.numpy()
        self.started, self.finished = _event(device), _event(device)
        self._used = False
        self._views: dict[BatchShape, dict[str, np.ndarray]] = {}

    def wait(self) -> None:
        """Until the device is done with what was here before."""
        if self._used:
            self.finished.synchronize()
        self._used = True

    def views(self, shape: BatchShape) -> dict[str, np.ndarray]:
        if shape not in self._views:
            if len(self._views) > 256:
                self._views.clear()
            self._views[shape] = shape.host_views(self._array)
        return self._views[shape]


class _HostClock:
    """An event for devices that compute while we wait."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _HostClock) -> float:
        return (later._time - self._time) * 1e3


def _event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostClock()


@dataclass(frozen=True, slots=True)
class PendingStep:
    plan: StepPlan
    packed: _Packed
    staging: _Staging
    logprobs: dict[int, TokenLogprobs | None]
    candidates: dict[str, Candidates]
    build_seconds: float

    def result(self) -> StepResult:
        """Wait for the step, and return its tokens in the plan's order."""
        self.staging.finished.synchronize()
        chunks = self.packed.chunks
        found = self.staging.tokens[: len(chunks)].tolist()
        logprobs = [self.logprobs.get(row) for row in range(len(chunks))]
        in_order = [chunk for chunk in self.plan.chunks if chunk.samples]
        if any(mine is not theirs for mine, theirs in zip(chunks, in_order, strict=True)):
            row_of = {id(chunk): row for row, chunk in enumerate(chunks)}
            rows = [row_of[id(chunk)] for chunk in in_order]
            found, logprobs = [found[row] for row in rows], [logprobs[row] for row in rows]
        seconds = self.staging.started.elapsed_time(self.staging.finished) * 1e-3
        timing = StepTiming(build=self.build_seconds, forward=seconds)
        return StepResult(self.plan, found, logprobs, timing, self.plan.idle_rows, candidates=self.candidates)

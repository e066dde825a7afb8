"""A step on its way: packed into the buffer that is sent to the device, launched, and read as a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Slot, Slots, Staging
from chairlift.core.plan import Candidates, Chunk, PromptOutputs, StepPlan, StepResult, StepTiming, TokenLogprobs
from chairlift.models.base import HiddenStates
from chairlift.runner.gpu.shapes import BatchShape, Shapes, fill_padding
from chairlift.sampling.draw import uniforms


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step in the staging buffer.

    Rows are sampled in the plan's order: for each chunk that samples, the row of its last known token and those of its
    drafts.
    """

    shape: BatchShape
    capturable: bool
    chunks: list[Chunk]  # those that sample
    slots: np.ndarray  # the slot of each of these
    num_sampled: int  # rows that are sampled
    first_rows: np.ndarray  # the first row of each chunk of the plan


class _Pieces:
    """The chunks of a plan as arrays, with every draft as a piece of its own.

    plan      a: prefill 3 | b: decode, 2 drafts | c: decode
    pieces    a            | b   b'  b''         | c
    rows      4            | 0   1   2           | 3          single tokens come first in the batch

    A step that verifies drafts is a decode step with more rows, computed by the same kernels: the keys and values of
    all are written before any is read. Those kernels read a context once for each of its tokens, but cut it into as
    many parts as the device has room for.

    The arrays are in the order of the pieces; those of `in_order` are in the order of the batch.
    """

    def __init__(self, chunks: Sequence[Chunk], slots: Sequence[Slot]) -> None:
        owned = np.array([1 + len(chunk.drafts) for chunk in chunks])
        of_piece = np.repeat(np.arange(len(chunks)), owned)
        self.firsts = np.cumsum(owned) - owned  # the first piece of each chunk
        places = np.arange(len(of_piece)) - self.firsts[of_piece]  # the place of each piece in its chunk
        chunk_starts = np.array([chunk.start for chunk in chunks], np.int32)
        chunk_counts = np.array([1 if chunk.drafts else chunk.count for chunk in chunks], np.int32)
        self.slots = np.array([slot.index for slot in slots], np.int32)[of_piece]
        self.counts = chunk_counts[of_piece]
        self.starts = chunk_starts[of_piece] + places.astype(np.int32)
        self.order = _order(self.counts, chunk_starts[of_piece])
        self.rows = np.empty_like(self.counts)  # the first of each piece
        self.rows[self.order] = np.cumsum(self.counts[self.order]) - self.counts[self.order]
        owners, ranks = of_piece[self.order].tolist(), places[self.order].tolist()
        self.in_order = [(chunks[owner], rank) for owner, rank in zip(owners, ranks, strict=True)]  # and its place
        self.num_single = int((self.counts == 1).sum())
        self.chunk_samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        self.sampling = np.flatnonzero(self.chunk_samples[of_piece])  # pieces

    def tiles(self, queries: int) -> list[tuple[int, int]]:
        """(piece in the batch's order, its first query) of all tiles of the longer chunks."""
        longer = range(self.num_single, len(self.in_order))
        return [(index, first) for index in longer for first in range(0, self.in_order[index][0].count, queries)]


@dataclass(frozen=True, slots=True)
class Packer:
    """Turns plans into inputs of the device, of which block tables are sent only as far as they changed."""

    slots: Slots
    shapes: Shapes
    tile_queries: int

    def pack(self, plan: StepPlan, staging: Staging) -> PackedStep:
        """Write the step into the staging buffer: single tokens first, then the longer chunks."""
        slots = [self.slots.of(chunk.request) for chunk in plan.chunks]
        cells: list[int] = []
        blocks: list[int] = []
        for slot, chunk in zip(slots, plan.chunks, strict=True):
            self.slots.table_changes(slot, chunk, cells, blocks)
        pieces = _Pieces(plan.chunks, slots)
        tiles = pieces.tiles(self.tile_queries)
        shape, capturable = self.shapes.choose(
            tokens=int(pieces.counts.sum()) + plan.idle_rows,
            chunks=len(pieces.in_order),
            singles=pieces.num_single,
            tiles=len(tiles),
            samples=len(pieces.sampling),
            updates=len(cells),
            longest=int(pieces.starts[pieces.counts == 1].max(initial=0)),
            deepest=int(pieces.starts[pieces.counts > 1].max(initial=0)),
            drafts=len(pieces.in_order) > len(plan.chunks),
        )
        if len(cells) > shape.updates:
            self.slots.send(cells, blocks)
            cells, blocks = [], []
        staging.wait()
        views = staging.views(shape.sections)
        fill_padding(views, self.slots.padding_cell)
        _pack_rows(views, pieces)
        if tiles:
            views["tile_chunk"][: len(tiles)], views["tile_offset"][: len(tiles)] = zip(*tiles, strict=True)
        if cells:
            views["update_cell"][: len(cells)] = cells
            views["update_block"][: len(cells)] = blocks
        if len(pieces.sampling):
            self._pack_sampling(views, pieces)
        return PackedStep(
            shape,
            capturable,
            [chunk for chunk in plan.chunks if chunk.samples],
            pieces.slots[pieces.firsts[pieces.chunk_samples]],
            len(pieces.sampling),
            pieces.rows[pieces.firsts],
        )

    def _pack_sampling(self, views: dict[str, np.ndarray], pieces: _Pieces) -> None:
        """Write which rows are sampled, where their tokens are kept, and the sampling parameters of their slots."""
        slots, sampling = self.slots, pieces.sampling
        count, indices = len(sampling), pieces.slots[sampling]
        ends = (pieces.starts + pieces.counts)[sampling]  # how many tokens come before the sampled one
        token_slots = np.full_like(pieces.slots, slots.padding)
        token_slots[pieces.firsts] = pieces.slots[pieces.firsts]  # the token after a draft is not the last token
        views["sample_slot"][:count] = token_slots[sampling]
        views["sample_row"][:count] = (pieces.rows + pieces.counts - 1)[sampling]
        temperature = slots.temperature[indices]
        if temperature.any():
            views["temperature"][:count] = temperature
            views["top_k"][:count] = slots.top_k[indices]
            views["top_p"][:count] = slots.top_p[indices]
            views["min_p"][:count] = slots.min_p[indices]
            views["uniform"][:count] = uniforms(slots.seed[indices], ends - slots.num_prompt[indices])


def _pack_rows(views: dict[str, np.ndarray], pieces: _Pieces) -> None:
    """Write the slot, position and token of each row, and where each piece begins."""
    order = pieces.order
    slots, rows, starts, counts = (array[order] for array in (pieces.slots, pieces.rows, pieces.starts, pieces.counts))
    owner = np.repeat(np.arange(len(order)), counts)  # the piece of each row
    total = len(owner)
    views["slot"][:total] = slots[owner]
    views["position"][:total] = np.arange(total, dtype=np.int32) - rows[owner] + starts[owner]
    views["token"][:total] = _tokens(pieces.in_order)
    for name, values in (("slot", slots), ("row", rows), ("start", starts), ("count", counts)):
        views[f"chunk_{name}"][: len(order)] = values


def _order(counts: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Single tokens first, those with the longest contexts at the front: the last ones to finish are then short.

    The tokens of one chunk stay side by side.
    """
    longer = counts > 1
    order: np.ndarray = np.lexsort((np.where(longer, 0, -contexts), longer))
    return order


def _tokens(in_order: Sequence[tuple[Chunk, int]]) -> list[int]:
    """The input tokens; -1 where the token is on the device only, because its step has not been read yet."""
    tokens: list[int] = []
    for chunk, place in in_order:
        if place:
            tokens.append(chunk.drafts[place - 1])
            continue
        known, start = chunk.request.tokens, chunk.start
        if chunk.count > 1 and not chunk.drafts:
            tokens.extend(known[start : start + chunk.count])
        else:
            tokens.append(known[start] if start < len(known) else -1)
    return tokens


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A step's batch and what the model computed for all its tokens: for a draft network, or for prompt outputs."""

    batch: StepBatch
    attention: StepAttention
    hidden: HiddenStates


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step on the device; a captured one is overwritten by the next of its shape."""

    logits: Tensor  # [samples, vocab]
    tokens: Tensor  # [samples] int32
    output: ModelOutput | None  # None if only the sampled rows are needed


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one request: one, and one more for each accepted draft."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that runs on the device while the host does something else."""

    plan: StepPlan
    packed: PackedStep
    staging: Staging
    from_host: dict[int, SampledTokens]  # The keys are indices among the chunks that sample.
    candidates: dict[str, Candidates]
    prompts: PromptOutputs
    build_seconds: float
    typical: bool  # whether later steps of its shape take as long: not if it was captured, or soon will be
    _read: list[StepResult] = field(default_factory=list)  # its result, once it was read

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        if not self._read:
            self._read.append(self._wait())
        return self._read[0]

    def _wait(self) -> StepResult:
        self.staging.finished.synchronize()
        tokens: list[int] = self.staging.results[: self.packed.num_sampled].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        accepted: dict[str, int] = {}
        if self.from_host or len(tokens) > len(self.packed.chunks):
            tokens, logprobs, accepted = self._verify(tokens)
        seconds = self.staging.started.elapsed_time(self.staging.finished) * 1e-3
        timing = StepTiming(build=self.build_seconds, forward=seconds)
        return StepResult(
            self.plan, tokens, logprobs, timing, self.plan.idle_rows, accepted, self.candidates, self.prompts
        )

    def _verify(self, sampled: Sequence[int]) -> tuple[list[int], list[TokenLogprobs | None], dict[str, int]]:
        """Each request's tokens up to the first that differs from its draft."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        accepted: dict[str, int] = {}
        row = 0
        for index, chunk in enumerate(self.packed.chunks):
            own = self.from_host.get(index) or _verified(chunk, sampled[row : row + chunk.num_scored])
            row += chunk.num_scored
            tokens += own.tokens
            logprobs += own.logprobs
            if len(own.tokens) > 1:
                accepted[chunk.request.id] = len(own.tokens) - 1
        return tokens, logprobs, accepted


def _verified(chunk: Chunk, sampled: Sequence[int]) -> SampledTokens:
    """Each token was sampled as if the drafts before it were right."""
    accepted = 0
    while accepted < len(chunk.drafts) and sampled[accepted] == chunk.drafts[accepted]:
        accepted += 1
    return SampledTokens(sampled[: accepted + 1], [None] * (accepted + 1))

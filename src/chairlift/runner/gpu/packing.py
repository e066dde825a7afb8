"""Packs a plan into the buffer that is sent to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.storage import sent
from chairlift.core.plan import Chunk, StepPlan
from chairlift.runner.gpu.shapes import BatchShape, Shapes, fill_padding
from chairlift.runner.gpu.slots import Slots
from chairlift.runner.gpu.staging import Staging
from chairlift.sampling.uniforms import uniforms


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


class Packer:
    """Turns plans into inputs of the device, of which block tables are sent only as far as they changed."""

    def __init__(self, slots: Slots, shapes: Shapes, tables: Tensor, tile_queries: int) -> None:
        self._slots = slots
        self._shapes = shapes
        self._tables = tables  # [slots + 1, blocks] int32, on the device
        self._tile_queries = tile_queries

    def pack(self, plan: StepPlan, staging: Staging) -> PackedStep:
        """Write the step into the staging buffer: single tokens first, then the longer chunks."""
        chunks = plan.chunks
        slots = [self._slots.of(chunk) for chunk in chunks]
        cells: list[int] = []
        blocks: list[int] = []
        for slot, chunk in zip(slots, chunks, strict=True):
            self._slots.table_changes(slot, chunk, cells, blocks)
        owned = np.array([1 + len(chunk.drafts) for chunk in chunks])
        firsts = np.cumsum(owned) - owned  # the first piece of each chunk
        pieces = [piece for chunk in chunks for piece in _apart(chunk)] if owned.sum() > len(chunks) else chunks
        of_piece = np.repeat(np.arange(len(chunks)), owned)
        indices = np.array([slot.index for slot in slots], np.int32)[of_piece]
        counts = np.array([piece.count for piece in pieces], np.int32)
        starts = np.array([piece.start for piece in pieces], np.int32)
        order = _order(counts, np.array([chunk.start for chunk in chunks])[of_piece])
        rows = np.empty_like(counts)
        rows[order] = np.cumsum(counts[order]) - counts[order]

        in_order = [pieces[index] for index in order.tolist()]
        num_single = int((counts == 1).sum())
        tiles = self._tiles(in_order, num_single)
        samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        sampling = np.flatnonzero(samples[of_piece])
        shape, capturable = self._shapes.choose(
            tokens=int(counts.sum()) + plan.idle_rows,
            chunks=len(pieces),
            singles=num_single,
            tiles=len(tiles),
            samples=len(sampling),
            updates=len(cells),
            longest=int(starts[counts == 1].max(initial=0)),
            deepest=int(starts[counts > 1].max(initial=0)),
        )
        if len(cells) > shape.updates:  # a long table at once, such as that of a prefix hit, is sent by itself
            self._send_tables(cells, blocks)
            cells, blocks = [], []
        staging.wait()
        views = staging.views(shape)
        fill_padding(views, self._slots.padding_cell)
        self._pack_rows(views, in_order, indices[order], starts[order], counts[order], rows[order])
        if tiles:
            views["tile_chunk"][: len(tiles)], views["tile_offset"][: len(tiles)] = zip(*tiles, strict=True)
        if cells:
            views["update_cell"][: len(cells)] = cells
            views["update_block"][: len(cells)] = blocks
        if len(sampling):
            token_slots = np.full_like(indices, self._slots.padding)
            token_slots[firsts] = indices[firsts]  # the token after a draft is not the request's last token
            views["sample_slot"][: len(sampling)] = token_slots[sampling]
            views["sample_row"][: len(sampling)] = (rows + counts - 1)[sampling]
            self._pack_sampling(views, indices[sampling], (starts + counts)[sampling])
        sampling_chunks = [chunk for chunk in chunks if chunk.samples]
        return PackedStep(shape, capturable, sampling_chunks, indices[firsts[samples]], len(sampling), rows[firsts])

    def _tiles(self, in_order: Sequence[Chunk], num_single: int) -> list[tuple[int, int]]:
        """(chunk, its first query) of the tiles of the longer chunks."""
        return [
            (index, at)
            for index in range(num_single, len(in_order))
            for at in range(0, in_order[index].count, self._tile_queries)
        ]

    def _send_tables(self, cells: Sequence[int], blocks: Sequence[int]) -> None:
        where, what = sent([cells, blocks], self._tables.device, torch.int32)
        self._tables.view(-1)[where] = what

    def _pack_rows(
        self,
        views: dict[str, np.ndarray],
        in_order: Sequence[Chunk],
        indices: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        owner = np.repeat(np.arange(len(in_order)), counts)
        total = len(owner)
        views["slot"][:total] = indices[owner]
        views["position"][:total] = np.arange(total, dtype=np.int32) - rows[owner] + starts[owner]
        views["token"][:total] = _tokens(in_order)
        for name, values in (("slot", indices), ("row", rows), ("start", starts), ("count", counts)):
            views[f"chunk_{name}"][: len(in_order)] = values

    def _pack_sampling(self, views: dict[str, np.ndarray], indices: np.ndarray, ends: np.ndarray) -> None:
        """Write the sampling parameters of each sampled row; `ends`: how many tokens come before the sampled one."""
        count, slots = len(indices), self._slots
        temperature = slots.temperature[indices]
        if temperature.any():
            views["temperature"][:count] = temperature
            views["top_k"][:count] = slots.top_k[indices]
            views["top_p"][:count] = slots.top_p[indices]
            views["min_p"][:count] = slots.min_p[indices]
            views["uniform"][:count] = uniforms(slots.seed[indices], ends - slots.num_prompt[indices])


def _apart(chunk: Chunk) -> list[Chunk]:
    """A chunk with drafts as single tokens of one slot, whose keys and values are all written before any is read.

    So a step that verifies drafts is a decode step with more rows, computed by the same kernels. Those read a context
    once for each of its tokens, but cut it into as many parts as the device has room for.
    """
    if not chunk.drafts:
        return [chunk]
    assert chunk.decodes
    known = replace(chunk, count=1, drafts=())
    return [known, *(replace(known, start=chunk.start + i, drafts=(token,)) for i, token in enumerate(chunk.drafts, 1))]


def _order(counts: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Single tokens first, those with the longest contexts at the front: the last ones to finish are then short.

    The tokens of one chunk stay side by side.
    """
    longer = counts > 1
    order: np.ndarray = np.lexsort((np.where(longer, 0, -contexts), longer))
    return order


def _tokens(in_order: Sequence[Chunk]) -> list[int]:
    """The input tokens; -1 where the token is on the device only, because its step has not been read yet."""
    tokens: list[int] = []
    for piece in in_order:
        known = piece.request.tokens
        if piece.count > 1:
            tokens.extend(known[piece.start : piece.end])
        elif piece.drafts:
            tokens.append(piece.drafts[0])
        else:
            tokens.append(known[piece.start] if piece.start < len(known) else -1)
    return tokens

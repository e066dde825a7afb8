"""Which of the target's hidden states a draft head keeps, and for how long."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import sent
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request, Status
from chairlift.models.base import HiddenStates
from chairlift.speculation.drafter import ComputedBatch

if TYPE_CHECKING:  # it is loaded with the network
    from chairlift.speculation.head_layers import DraftHead

MAX_PENDING_STATES = 64  # A request keeps at most these until its next draft.


class HeadStates(ABC):
    """The target's features of the last tokens of each request, until the head has computed what follows them."""

    @abstractmethod
    def first_position(self, request: Request) -> int:
        """The first of the request's tokens that the head has not computed and has a state for."""

    @abstractmethod
    def take(self, spans: Sequence[tuple[Request, int]]) -> Tensor:
        """The features before the first `count` tokens of each request from its first position on, one behind the other
        [tokens, features]; zeros where they are unknown. All but the last known token are going to be computed."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop the states of a request."""


class PendingStates:
    """The tokens that a draft head has not computed yet: the first one's position, and for it and all later ones the
    target's features before it."""

    def __init__(self, request: Request, first: int, states: Tensor) -> None:
        self.request = request
        self.first = first
        self.end = first + len(states)
        # [tokens, features] each, one per step: joining them would copy all at every step.
        self.parts = deque([states])

    def states(self) -> Tensor:
        """[end - first, features]."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat([*self.parts])

    def append(self, states: Tensor) -> None:
        """Add the states of a step; beyond MAX_PENDING_STATES the oldest are dropped, at the price of worse drafts."""
        self.parts.append(states)
        self.end += len(states)
        while self.end - self.first > MAX_PENDING_STATES:
            self.first += len(self.parts.popleft())


class KeptStates(HeadStates):
    """Slices of the steps that computed them."""

    def __init__(self, feature_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._feature_size, self._dtype, self._device = feature_size, dtype, device
        self.pending: dict[str, PendingStates] = {}  # The keys are request ids.

    def first_position(self, request: Request) -> int:
        pending = self.pending.get(request.id)
        if pending is None or pending.end != request.num_known:
            return request.num_known - 1  # it was preempted: the head sees its last token only
        return min(pending.first, request.num_known - 1)

    def take(self, spans: Sequence[tuple[Request, int]]) -> Tensor:
        taken: list[Tensor] = []
        for request, count in spans:
            start = self.first_position(request)
            parts = self._take(request, start)
            # A pass that only catches up leaves out the last token, which comes with the first draft token.
            taken += parts if start + count == request.num_known else [torch.cat([*parts])[:count]]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _take(self, request: Request, start: int) -> Sequence[Tensor]:
        end, pending = request.num_known, self.pending.get(request.id)
        if pending is not None and (pending.first, pending.end) == (start, end):
            parts = pending.parts
        else:
            parts = deque([torch.zeros(end - start, self._feature_size, dtype=self._dtype, device=self._device)])
        # The last token is computed again next time: a step with prompts may have computed it without its state.
        self.pending[request.id] = PendingStates(request, end - 1, parts[-1][-1:])
        return parts

    def before(self, chunks: Sequence[Chunk], like: Tensor) -> Tensor:
        """The features before the first token of each chunk [chunks, features], in the type of `like`; zeros where they
        are unknown, such as after a prefix hit."""
        unknown = torch.zeros_like(like[:1])
        features = []
        for chunk in chunks:
            pending = self.pending.get(chunk.request.id)
            known = pending is not None and (pending.first, pending.end) == (chunk.start, chunk.start + 1)
            features.append(pending.states() if known and pending is not None else unknown)
        return torch.cat(features)

    def keep(self, step: ComputedBatch, features: Tensor, has_prompts: bool) -> None:
        """Keep the features of a step, whose prompts the head has computed."""
        # States are slices of whole steps: those of preempted requests would keep the steps in memory.
        for pending in [pending for pending in self.pending.values() if pending.request.status is not Status.RUNNING]:
            self.forget(pending.request.id)
        chunks, offsets = step.plan.chunks, step.first_rows
        rows = iter(step.kept)
        taken: list[tuple[Chunk, int]] = []  # Each chunk has the position of its next token.
        spans: list[range] = []  # their rows
        for offset, chunk in zip(offsets, chunks, strict=False):
            last = next(rows) if chunk.samples else offset + chunk.count - 1
            first = offset if self._continues(chunk) else last
            taken.append((chunk, chunk.start + last - offset + 1))
            spans.append(range(first, last + 1))
        # Only the last row of prompts and accepted draft tokens are kept: a copy frees the rest of the step.
        copies = has_prompts or step.plan.num_drafts > 0
        for (chunk, position), states in zip(taken, _cut(features, spans, copies), strict=True):
            if self._continues(chunk):
                self.pending[chunk.request.id].append(states)
            else:
                self.pending[chunk.request.id] = PendingStates(chunk.request, position, states)

    def _continues(self, chunk: Chunk) -> bool:
        """Whether its states follow those that are pending."""
        pending = self.pending.get(chunk.request.id)
        return chunk.decodes and pending is not None and pending.end == chunk.start + 1

    def forget(self, request_id: str) -> None:
        self.pending.pop(request_id, None)


def _cut(features: Tensor, spans: Sequence[range], copies: bool) -> Sequence[Tensor]:
    """These rows; with `copies`, in memory of their own, copied by one launch for all."""
    if not copies:
        return [features[span.start : span.stop] for span in spans]
    rows = sent([row for span in spans for row in span], features.device)
    copied: Sequence[Tensor] = features.index_select(0, rows).split([len(span) for span in spans])
    return copied


LENGTH = 64  # rows of a ring
KEPT = LENGTH - 16  # the last tokens that have a state: wrong draft tokens may have overwritten those before


class RecentStates(HeadStates):
    """The target's last hidden states of each request on the device.

    Every step stores its own, as part of its graph: the host does nothing for it, whether there are drafts or not. The
    states of a request lie in a ring by position, so those of wrong draft tokens are overwritten by those of right
    ones.

        position    60 61 62 63 | 64 65 66        a ring of 64 rows: 64 takes the row of 0
        row         60 61 62 63 |  0  1  2

    Prompts are computed for the head in the same graph, since their keys and values stay in the prefix cache.
    """

    def __init__(self, head: DraftHead, unwritten: UnwrittenBlocks, slots: Slots) -> None:
        self._head, self._unwritten, self._slots = head, unwritten, slots
        self.zero_row = slots.count * LENGTH  # never written
        dtype, device = head.target.dtype, slots.tables.device
        self.ring = torch.zeros(self.zero_row + 1, head.feature_size, dtype=dtype, device=device)
        self._computed: dict[str, tuple[int, int]] = {}  # request id -> generation, tokens that the head has computed

    # ---- on the device: part of a step's graph ----------------------------------------------------------------------

    def store(
        self, batch: StepBatch, view: Mapping[str, Tensor], attention: StepAttention, hidden: HiddenStates
    ) -> None:
        """Store the states of a step, and the head's keys and values if the step has prompts."""
        from chairlift.kernels.triton.drafts import store_states

        parts = self._head.feature_parts(hidden)
        if len(view["state_row"]):
            previous = self._previous(torch.cat(parts, dim=-1), view)
            self._head.store_keys(batch.tokens, self._head.join(previous), batch.positions, attention)
        store_states(parts, view["slot"], view["position"], self.ring, LENGTH)

    def _previous(self, features: Tensor, view: Mapping[str, Tensor]) -> Tensor:
        """The features before each row: those of the row before it, or those in the ring for the first of a chunk."""
        shifted = torch.empty(len(features) + 1, features.shape[1], dtype=features.dtype, device=features.device)
        shifted[1:] = features
        shifted.index_copy_(0, view["state_to"].long(), self.ring.index_select(0, view["state_row"]))
        return shifted[:-1]

    # ---- on the host ------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, first_rows: np.ndarray, views: Mapping[str, np.ndarray]) -> None:
        """Note the blocks that a step begins; if it has prompts, write where the states before each chunk lie."""
        has_prompts = bool(len(views["state_row"]))
        self._unwritten.note(plan, self._slots.block_size, computes_prompts=has_prompts)
        if has_prompts:
            slots = [self._slots.of(chunk.request) for chunk in plan.chunks]
            views["state_to"][: len(slots)] = first_rows
            views["state_row"][: len(slots)] = [
                slot.index * LENGTH + (chunk.start - 1) % LENGTH if chunk.start > slot.first else self.zero_row
                for chunk, slot in zip(plan.chunks, slots, strict=True)
            ]
            for chunk in plan.chunks:
                if not chunk.decodes:
                    self._computed[chunk.request.id] = chunk.generation, chunk.end

    def first_position(self, request: Request) -> int:
        slot, known = self._slots.held(request), request.num_known
        if slot is None:
            return known - 1  # it was preempted: the head sees its last token only
        return min(max(self._num_computed(request), slot.first, known - KEPT), known - 1)

    def _num_computed(self, request: Request) -> int:
        generation, count = self._computed.get(request.id, (-1, 0))
        return count if generation == request.generation else 0

    def _rows(self, request: Request, first: int, end: int) -> range | list[int]:
        """The rows of the ring with the features before the tokens from `first` to `end`."""
        slot = self._slots.held(request)
        if slot is None:
            return [self.zero_row] * (end - first)
        if first <= slot.first:  # no state precedes the first token that was computed, as after a prefix hit
            known = min(slot.first + 1, end)
            rest = self._rows(request, known, end) if known < end else ()
            return [*[self.zero_row] * (known - first), *rest]
        start, at = slot.index * LENGTH, (first - 1) % LENGTH
        if at + end - first <= LENGTH:
            return range(start + at, start + at + end - first)
        return [start + place % LENGTH for place in range(at, at + end - first)]

    def take_rows(self, request: Request, first: int, end: int) -> range | list[int]:
        """The same, for tokens that are going to be computed now; the last known one is computed again with the next
        draft."""
        rows = self._rows(request, first, end)
        self._computed[request.id] = request.generation, request.num_known - 1
        return rows

    def take(self, spans: Sequence[tuple[Request, int]]) -> Tensor:
        rows: list[int] = []
        for request, count in spans:
            first = self.first_position(request)
            rows += self.take_rows(request, first, first + count)
        return self.ring.index_select(0, sent(rows, self.ring.device))

    def release(self) -> int:
        """Free the memory and return its size; no step may follow."""
        size = self.ring.nbytes
        self.ring = self.ring.new_empty(0)
        return size

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)


MANY = 64  # blocks that are cleared at once beside those of the requests at hand


class UnwrittenBlocks:
    """From which of its places on a block has to be cleared before the head reads it."""

    def __init__(self) -> None:
        self._first_place: dict[int, int] = {}  # The keys are blocks.
        self._swapped: dict[int, int] = {}  # the same by slot in host memory

    def note(self, plan: StepPlan, block_size: int, *, computes_prompts: bool = False) -> None:
        """Note what a step begins. With `computes_prompts` the step has computed prompts for the head, too."""
        marks = self._first_place
        for swap in plan.swap_outs:
            _copy(marks, swap.block, self._swapped, swap.slot)
        for swap in plan.swap_ins:
            _copy(self._swapped, swap.slot, marks, swap.block)
        for chunk in plan.chunks:
            for copy in chunk.copies:
                _copy(marks, copy.source, marks, copy.target)
            start, end = chunk.start, chunk.start + chunk.count
            is_computed = computes_prompts and not chunk.decodes
            if chunk.count == 1 and start % block_size and not is_computed:  # most decodes
                continue
            if is_computed:
                self._note_computed(chunk.table, start, end, block_size)
            else:
                marks.update(dict.fromkeys(chunk.table[-(-start // block_size) : -(-end // block_size)], 0))

    def _note_computed(self, table: Sequence[int], start: int, end: int, block_size: int) -> None:
        """The head has computed the tokens from `start` to `end` of a request."""
        marks, first = self._first_place, table[start // block_size]
        before = marks.get(first, block_size)
        for block in table[start // block_size : -(-end // block_size)]:
            marks.pop(block, None)
        if end % block_size:
            marks[table[end // block_size]] = end % block_size
        if before < start % block_size:  # it has not computed some places before; those after them are cleared, too
            marks[first] = before

    def take(self, tables: Sequence[Sequence[int]], block_size: int) -> list[int]:
        """The slots (block * block_size + place) to clear in blocks of these tables, which then count as cleared."""
        found = self._first_place
        if not found:
            return []
        blocks = [*islice(found, MANY)]
        if len(found) > MANY:
            blocks += [block for block in chain.from_iterable(tables) if block in found]
        return [
            slot
            for block in dict.fromkeys(blocks)
            for slot in range(block * block_size + found.pop(block), (block + 1) * block_size)
        ]


def _copy(source: dict[int, int], key: int, target: dict[int, int], other: int) -> None:
    """Give a copied block the mark of its source."""
    target.pop(other, None)
    if key in source:
        target[other] = source[key]

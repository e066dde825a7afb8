"""The target's last hidden states of each request on the device, where a draft head reads them.

Every step stores its own, as part of its graph: the host does nothing for it, whether there are drafts or not. The
states of a request lie in a ring by position, so those of wrong draft tokens are overwritten by those of right ones.

    position    60 61 62 63 | 64 65 66        a ring of 64 rows: 64 takes the row of 0
    row         60 61 62 63 |  0  1  2

Prompts are computed for the head in the same graph, since their keys and values stay in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Slot, Slots
from chairlift.attention.storage import sent
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.models.base import HiddenStates
from chairlift.speculation.draft_head import HeadNetwork
from chairlift.speculation.head_states import HeadStates

LENGTH = 64  # rows of a ring
KEPT = LENGTH - 16  # the last tokens that have a state: wrong draft tokens may have overwritten those before


class RecentStates(HeadStates):
    """A ring of states for each slot."""

    def __init__(self, network: HeadNetwork, slots: Slots, dtype: torch.dtype, device: torch.device) -> None:
        assert network.max_length < LENGTH - KEPT
        self._head, self._unwritten, self._slots = network.head, network.unwritten, slots
        self.zero_row = slots.count * LENGTH  # never written
        self.ring = torch.zeros(self.zero_row + 1, network.feature_size, dtype=dtype, device=device)
        self._computed: dict[str, tuple[int, int]] = {}  # request id -> generation, tokens that the head has computed

    # ---- on the device: part of a step's graph ----------------------------------------------------------------------

    def store(self, batch: StepBatch, view: dict[str, Tensor], attention: StepAttention, hidden: HiddenStates) -> None:
        """Store the states of a step, and the head's keys and values if the step has prompts."""
        from chairlift.kernels.triton.drafts.recent_states import store_states

        parts = self._head.feature_parts(hidden)
        if len(view["state_row"]):
            previous = self._previous(torch.cat(parts, dim=-1), view)
            self._head.store_keys(batch.tokens, self._head.join(previous), batch.positions, attention)
        store_states(parts, view["slot"], view["position"], self.ring, LENGTH)

    def _previous(self, features: Tensor, view: dict[str, Tensor]) -> Tensor:
        """The features before each row: those of the row before it, or those in the ring for the first of a chunk."""
        shifted = torch.empty(len(features) + 1, features.shape[1], dtype=features.dtype, device=features.device)
        shifted[1:] = features
        shifted.index_copy_(0, view["state_to"].long(), self.ring.index_select(0, view["state_row"]))
        return shifted[:-1]

    # ---- on the host ------------------------------------------------------------------------------------------------

    def note(self, plan: StepPlan, *, computes_prompts: bool) -> None:
        """Note the blocks that a step begins."""
        self._unwritten.note(plan, self._slots.block_size, computes_prompts=computes_prompts)

    def pack(
        self, views: dict[str, np.ndarray], chunks: Sequence[Chunk], slots: Sequence[Slot], first_rows: np.ndarray
    ) -> None:
        """Write where the states before each chunk of a step with prompts lie."""
        views["state_to"][: len(chunks)] = first_rows
        views["state_row"][: len(chunks)] = [
            slot.index * LENGTH + (chunk.start - 1) % LENGTH if chunk.start > slot.first else self.zero_row
            for chunk, slot in zip(chunks, slots, strict=True)
        ]
        for chunk in chunks:
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

    def rows(self, request: Request, first: int, end: int) -> range | list[int]:
        """The rows of the ring with the features before the tokens from `first` to `end`."""
        slot = self._slots.held(request)
        if slot is None:
            return [self.zero_row] * (end - first)
        if first <= slot.first:  # no state precedes the first token that was computed, as after a prefix hit
            known = min(slot.first + 1, end)
            rest = self.rows(request, known, end) if known < end else ()
            return [*[self.zero_row] * (known - first), *rest]
        start, at = slot.index * LENGTH, (first - 1) % LENGTH
        if at + end - first <= LENGTH:
            return range(start + at, start + at + end - first)
        return [start + place % LENGTH for place in range(at, at + end - first)]

    def drafted(self, request: Request) -> None:
        """All known tokens of a request are computed; the last one is computed again with the next draft."""
        self._computed[request.id] = request.generation, request.num_known - 1

    def take(self, spans: Sequence[tuple[Request, int]]) -> Tensor:
        rows: list[int] = []
        for request, count in spans:
            first = self.first_position(request)
            rows += self.rows(request, first, first + count)
            self.drafted(request)
        return self.ring.index_select(0, sent(rows, self.ring.device))

    def num_bytes(self, num_requests: int) -> int:
        return self.ring.nbytes

    def release(self) -> None:
        """Free the memory; no step may follow."""
        self.ring = self.ring.new_empty(0)

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

"""Draft tokens from a draft head: which of the target's hidden states it keeps, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.attention.input_batch import InputBatch
from chairlift.attention.interface import Attend, HostAttend
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.plan import Chunk
from chairlift.core.request import Request, Status
from chairlift.speculation.control.proposer import Draft
from chairlift.speculation.draft_network import A_FEW, ComputedBatch, DraftPass
from chairlift.speculation.draft_proposer import DraftTask
from chairlift.speculation.head_config import MAX_LENGTH
from chairlift.speculation.head_layers import DraftHead

MAX_PENDING_STATES = 64  # of a request, kept until its next draft


class HeadNetwork:
    """Computes prompts when the target does, because they stay in the prefix cache. The target's states of generated
    tokens are kept until the next draft.

    Every block is cleared when its first token is written. So where the head has not computed a token it reads zeros,
    or a wrong draft token, but never what another request left there. (Zeros give better drafts than masking.)"""

    catches_up_in_parts = False  # it computes all tokens that it has states for, or none
    max_length = MAX_LENGTH

    def __init__(self, head: DraftHead) -> None:
        self.token_ids: Tensor | None = head.token_ids
        self.feature_size = head.feature_size
        self.one_call = head.drafts_in_one_call  # whether it has `draft`
        self._head = head
        self._pending: dict[str, PendingStates] = {}  # by request id
        self._last_state: dict[str, Tensor] = {}  # by request id: the head's own state of the last draft token

    def first_position(self, request: Request) -> int:
        pending = self._pending.get(request.id)
        if pending is None or pending.end != request.num_known:
            return request.num_known - 1  # it was preempted: the head sees its last token only
        return min(pending.first, request.num_known - 1)

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        given: list[Tensor] = []
        if chunks[0].drafts:  # either all chunks have drafts or none
            given = [self._last_state[chunk.request.id][None] for chunk in chunks]
            rows = last_rows
        else:
            places = [*zip(batch.layout.offsets, chunks, strict=False)]
            # A pass that only catches up leaves out the last token, which comes with the first draft token.
            given = [torch.cat([*self.take(chunk.request)])[: chunk.count] for chunk in chunks]
            rows = sent([row for at, chunk in places for row in range(at, at + chunk.count)], batch.tokens.device)
        known = torch.cat(given)
        previous = torch.zeros(len(batch.tokens), known.shape[1], dtype=known.dtype, device=known.device)
        previous.index_copy_(0, rows, known)
        if not chunks[0].drafts:
            previous = self._head.join(previous)
        found = self._pass(batch.tokens, previous, batch.positions, last_rows, attend)
        assert found.states is not None
        for chunk, state in zip(chunks, found.states, strict=True):
            self._last_state[chunk.request.id] = state
        return found.scores

    def first_pass(
        self, tokens: Tensor, features: Tensor, positions: Tensor, last_rows: Tensor, attend: Attend
    ) -> DraftPass:
        return self._pass(tokens, self._head.join(features), positions, last_rows, attend)

    def next_pass(self, tokens: Tensor, states: Tensor | None, positions: Tensor, attend: Attend) -> DraftPass:
        assert states is not None
        return self._pass(tokens, states, positions, None, attend)

    def _pass(
        self, tokens: Tensor, previous: Tensor, positions: Tensor, last_rows: Tensor | None, attend: Attend
    ) -> DraftPass:
        """previous [T, hidden]: the states before the tokens."""
        states = self._head.states(tokens, previous, positions, attend)
        if last_rows is not None:
            states = states.index_select(0, last_rows)
        return DraftPass(self._head.scores(states), states)

    def drafted(self, request: Request, count: int) -> None:
        pass  # its next draft begins with the target's states again

    def catch_up(self, tasks: Sequence[DraftTask], storage: KVStorage) -> bool:
        """Compute the tokens of a pause, except the last ones, in one call; return whether there were any."""
        size = storage.block_size
        rows: list[tuple[int, int, int]] = []  # token, position, slot
        features: list[Tensor] = []
        for task in tasks:
            request, first, last = task.request, self.first_position(task.request), task.request.num_known - 1
            if last - first >= A_FEW:
                positions = range(first, last)
                rows += [(request.tokens[p], p, task.table[p // size] * size + p % size) for p in positions]
                features.append(torch.cat([*self.take(request)])[:-1])
        if rows:
            tokens, token_positions, slots = torch.tensor(rows).T.contiguous()
            self._head.store(tokens, torch.cat(features), token_positions, slots, storage)
        return bool(rows)

    def draft(self, tasks: Sequence[DraftTask], storage: KVStorage) -> list[Draft]:
        """The likeliest draft tokens, in one call. The task of the greatest length comes first."""
        from chairlift.speculation.fused_head import HeadTask

        head_tasks: list[HeadTask] = []
        tokens: list[int] = []
        features: list[Tensor] = []
        for task in tasks:
            start, end = self.first_position(task.request), task.request.num_known
            least = task.min_chance, task.min_chance_to_extend
            head_tasks.append(HeadTask(start, end, task.table, task.length, *least, task.chances))
            tokens += task.request.tokens[start:end]
            features += self.take(task.request)
        joined = features[0] if len(features) == 1 else torch.cat(features)
        return self._head.draft(head_tasks, tokens, joined, storage)

    def take(self, request: Request) -> Sequence[Tensor]:
        """The target's features before each of these tokens; zeros where they are unknown."""
        start, end = self.first_position(request), request.num_known
        pending, head = self._pending.get(request.id), self._head
        if pending is not None and (pending.first, pending.end) == (start, end):
            parts = pending.parts
        else:
            shape = (end - start, head.feature_size)
            parts = deque([torch.zeros(shape, dtype=head.target.dtype, device=head.target.device)])
        # The last token is computed again next time: a step with prompts may have computed it without its state.
        self._pending[request.id] = PendingStates(request, end - 1, parts[-1][-1:])
        return parts

    def observe_step(self, step: ComputedBatch) -> None:
        self._clear_new_blocks(step)
        chunks = step.plan.chunks
        has_prompts = not all(chunk.decodes for chunk in chunks)
        # States are slices of whole steps: those of preempted requests would keep the steps in memory.
        for pending in [pending for pending in self._pending.values() if pending.request.status is not Status.RUNNING]:
            self.forget(pending.request.id)
        self._keep_states(step, has_prompts)

    def state_bytes(self, num_requests: int) -> int:
        """States of decode steps are kept whole, padding rows included, which `num_requests` counts as well."""
        return MAX_PENDING_STATES * num_requests * self._head.feature_size * self._head.target.dtype.itemsize

    def _clear_new_blocks(self, step: ComputedBatch) -> None:
        size = step.storage.block_size
        begun: list[int] = []
        for chunk in step.plan.chunks:
            if chunk.count > 1 or chunk.start % size == 0:
                begun += chunk.table[-(-chunk.start // size) : -(-chunk.end // size)]
        if begun:
            step.storage.clear(self._head.attention_layers[0].index, begun)

    def _keep_states(self, step: ComputedBatch, has_prompts: bool) -> None:
        chunks, offsets = step.plan.chunks, step.batch.layout.offsets
        features = self._head.features(step.hidden)
        if has_prompts:
            self._compute_prompts(step, features)
        rows = iter(step.kept)
        taken: list[tuple[Chunk, int]] = []  # and the position of its next token
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
                self._pending[chunk.request.id].append(states)
            else:
                self._pending[chunk.request.id] = PendingStates(chunk.request, position, states)

    def _continues(self, chunk: Chunk) -> bool:
        """Whether its states follow those that are pending."""
        pending = self._pending.get(chunk.request.id)
        return chunk.decodes and pending is not None and pending.end == chunk.start + 1

    def _compute_prompts(self, step: ComputedBatch, features: Tensor) -> None:
        """Compute the whole step, since it is one batch: decodes are computed again for the next draft."""
        batch, attend = step.batch, step.attend
        places = [*zip(batch.layout.offsets, step.plan.chunks, strict=False)]
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        known: dict[int, Tensor] = {}  # by row
        for offset, chunk in places:
            pending = self._pending.get(chunk.request.id)
            if pending is not None and (pending.first, pending.end) == (chunk.start, chunk.start + 1):
                known[offset] = pending.states()
        unknown = [offset for offset, _ in places if offset not in known]  # such as after a prefix hit
        if unknown:
            previous.index_fill_(0, sent(unknown, previous.device), 0.0)
        if known:
            previous.index_copy_(0, sent([*known], previous.device), torch.cat([*known.values()]))
        if self.one_call and isinstance(attend, HostAttend):
            prompts = [range(offset, offset + chunk.count) for offset, chunk in places if not chunk.decodes]
            rows = torch.tensor([row for some in prompts for row in some])
            positions, slots = batch.positions[rows], batch.layout.slot_mapping[rows]
            self._head.store(batch.tokens[rows], previous[rows], positions, slots, step.storage)
        else:
            self._head.states(batch.tokens, self._head.join(previous), batch.positions, attend)

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._last_state.pop(request_id, None)


def _cut(features: Tensor, spans: Sequence[range], copies: bool) -> Sequence[Tensor]:
    """These rows; with `copies`, in memory of their own, copied by one launch for all."""
    if not copies:
        return [features[span.start : span.stop] for span in spans]
    rows = sent([row for span in spans for row in span], features.device)
    copied: Sequence[Tensor] = features.index_select(0, rows).split([len(span) for span in spans])
    return copied


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

"""Draft tokens from a draft head, which reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.speculation.control.proposer import A_FEW, Draft
from chairlift.speculation.draft_network import ComputedBatch, DraftPass
from chairlift.speculation.draft_proposer import DraftTask
from chairlift.speculation.head_layers import MAX_LENGTH, DraftHead
from chairlift.speculation.head_states import HeadStates, KeptStates, UnwrittenBlocks


class HeadNetwork:
    """Computes prompts when the target does, because they stay in the prefix cache. The target's states of generated
    tokens are kept until the next draft.

    What the target begins of a block is cleared before the head reads it. So where the head has not computed a token it
    reads zeros, or a wrong draft token, but never what another request left there. (Zeros give better drafts than
    masking.)"""

    catches_up_in_parts = False  # it computes all tokens that it has states for, or none
    max_length = MAX_LENGTH

    def __init__(self, head: DraftHead) -> None:
        self.token_ids: Tensor | None = head.token_ids
        self.feature_size = head.feature_size
        self.one_call = head.drafts_in_one_call  # whether it has `draft`
        self.head = head
        self.states: HeadStates = KeptStates(self.feature_size, head.target.dtype, head.target.device)
        self.unwritten = UnwrittenBlocks()
        self._last_state: dict[str, Tensor] = {}  # by request id: the head's own state of the last draft token

    def first_position(self, request: Request) -> int:
        return self.states.first_position(request)

    def scores(self, batch: StepBatch, chunks: Sequence[Chunk], last_rows: Tensor, attention: StepAttention) -> Tensor:
        if chunks[0].drafts:  # either all chunks have drafts or none
            known = torch.stack([self._last_state[chunk.request.id] for chunk in chunks])
            rows = last_rows
        else:
            places = [*zip(batch.layout.offsets, chunks, strict=False)]
            known = self.states.take([(chunk.request, chunk.count) for chunk in chunks])
            rows = sent([row for at, chunk in places for row in range(at, at + chunk.count)], batch.tokens.device)
        previous = torch.zeros(len(batch.tokens), known.shape[1], dtype=known.dtype, device=known.device)
        previous.index_copy_(0, rows, known)
        if not chunks[0].drafts:
            previous = self.head.join(previous)
        found = self._pass(batch, previous, last_rows, attention)
        assert found.states is not None
        for chunk, state in zip(chunks, found.states, strict=True):
            self._last_state[chunk.request.id] = state
        return found.scores

    def first_pass(self, batch: StepBatch, features: Tensor, last_rows: Tensor, attention: StepAttention) -> DraftPass:
        return self._pass(batch, self.head.join(features), last_rows, attention)

    def next_pass(self, batch: StepBatch, states: Tensor | None, attention: StepAttention) -> DraftPass:
        assert states is not None
        return self._pass(batch, states, None, attention)

    def _pass(
        self, batch: StepBatch, previous: Tensor, last_rows: Tensor | None, attention: StepAttention
    ) -> DraftPass:
        """previous [T, hidden]: the states before the tokens."""
        states = self.head.states(batch.tokens, previous, batch.positions, attention)
        if last_rows is not None:
            states = states.index_select(0, last_rows)
        return DraftPass(self.head.scores(states), states)

    def begin_draft(self, tables: Sequence[Sequence[int]], storage: KVStorage) -> None:
        slots = self.unwritten.take(tables, storage.block_size)
        if slots:
            storage.clear(self.head.attention_layers[0].index, slots)

    def drafted(self, request: Request, count: int) -> None:
        pass  # its next draft begins with the target's states again

    def catch_up(self, tasks: Sequence[DraftTask], storage: KVStorage) -> bool:
        """Compute the tokens of a pause, except the last ones, in one call; return whether there were any."""
        size = storage.block_size
        rows: list[tuple[int, int, int]] = []  # token, position, slot
        spans: list[tuple[Request, int]] = []
        for task in tasks:
            request, first, last = task.request, self.first_position(task.request), task.request.num_known - 1
            if last - first >= A_FEW:
                positions = range(first, last)
                rows += [(request.tokens[p], p, task.table[p // size] * size + p % size) for p in positions]
                spans.append((request, last - first))
        if rows:
            tokens, token_positions, slots = torch.tensor(rows).T.contiguous()
            self.head.store(tokens, self.states.take(spans), token_positions, slots, storage)
        return bool(rows)

    def draft(self, tasks: Sequence[DraftTask], storage: KVStorage) -> list[Draft]:
        """The likeliest draft tokens, in one call. The task of the greatest length comes first."""
        from chairlift.speculation.fused_head import HeadTask

        head_tasks: list[HeadTask] = []
        tokens: list[int] = []
        for task in tasks:
            start, end = self.first_position(task.request), task.request.num_known
            least = task.min_chance, task.min_chance_to_extend
            head_tasks.append(HeadTask(start, end, task.table, task.length, *least, task.chances))
            tokens += task.request.tokens[start:end]
        taken = [(task.request, one.end - one.start) for task, one in zip(tasks, head_tasks, strict=True)]
        return self.head.draft(head_tasks, tokens, self.states.take(taken), storage)

    # ---- steps of the target --------------------------------------------------------------------------------------

    def observe_step(self, step: ComputedBatch) -> None:
        """Compute the prompts of a step and keep its states, where the runner does not do it by itself."""
        states, features = self.states, self.head.features(step.hidden)
        assert isinstance(states, KeptStates)
        has_prompts = not all(chunk.decodes for chunk in step.plan.chunks)
        self.unwritten.note(step.plan, step.storage.block_size)
        if has_prompts:
            self.begin_draft([chunk.table for chunk in step.plan.chunks], step.storage)
            self._compute_prompts(step, features, states.before(step.plan.chunks, features))
        states.keep(step, features, has_prompts)

    def _compute_prompts(self, step: ComputedBatch, features: Tensor, before: Tensor) -> None:
        """Compute the whole step, since it is one batch: decodes are computed again for the next draft.

        before [chunks, features]: those of the token before each chunk."""
        batch, attention = step.batch, step.attention
        places = [*zip(step.first_rows, step.plan.chunks, strict=False)]
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        firsts = sent([offset for offset, _ in places], previous.device)
        previous.index_copy_(0, firsts, before)
        if self.one_call and attention.work(self.head.attention_layers[0]) is not None:
            prompts = [range(offset, offset + chunk.count) for offset, chunk in places if not chunk.decodes]
            rows = torch.tensor([row for some in prompts for row in some])
            positions, slots = batch.positions[rows], batch.layout.slot_mapping[rows]
            self.head.store(batch.tokens[rows], previous[rows], positions, slots, step.storage)
        else:
            self.head.store_keys(batch.tokens, self.head.join(previous), batch.positions, attention)

    def state_bytes(self, num_requests: int) -> int:
        return self.states.num_bytes(num_requests)

    def forget(self, request_id: str) -> None:
        self.states.forget(request_id)
        self._last_state.pop(request_id, None)

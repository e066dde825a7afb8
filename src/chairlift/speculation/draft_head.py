"""Draft tokens from a draft head, which reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.request import Request
from chairlift.speculation.control.proposer import A_FEW, Draft
from chairlift.speculation.drafter import ComputedBatch, DraftNetwork, DraftPass, DraftTask
from chairlift.speculation.head_layers import DraftHead
from chairlift.speculation.head_states import HeadStates, KeptStates, RecentStates, UnwrittenBlocks


class HeadNetwork(DraftNetwork):
    """Computes prompts when the target does, because they stay in the prefix cache. The target's states of generated
    tokens are kept until the next draft.

    What the target begins of a block is cleared before the head reads it. So where the head has not computed a token it
    reads zeros, or a wrong draft token, but never what another request left there. (Zeros give better drafts than
    masking.)"""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.token_ids = head.token_ids
        self.unwritten = UnwrittenBlocks()
        self._kept = KeptStates(head.feature_size, head.target.dtype, head.target.device)
        self.states: HeadStates = self._kept
        if head.drafts_in_one_call:
            self.one_call = HeadCalls(head, self._kept)

    def attach(self, slots: Slots) -> RecentStates:
        recent = self.states = RecentStates(self.head, self.unwritten, slots)
        return recent

    def first_position(self, request: Request) -> int:
        return self.states.first_position(request)

    def first_pass(
        self, batch: StepBatch, features: Tensor | None, last_rows: Tensor, attention: StepAttention
    ) -> DraftPass:
        assert features is not None
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

    # ---- steps of the target --------------------------------------------------------------------------------------

    def observe_step(self, step: ComputedBatch, storage: KVStorage) -> None:
        """Compute the prompts of a step and keep its states, where steps do not store them by themselves."""
        chunks, features = step.plan.chunks, self.head.features(step.hidden)
        has_prompts = not all(chunk.decodes for chunk in chunks)
        self.unwritten.note(step.plan, storage.block_size)
        if has_prompts:
            self.begin_draft([chunk.table for chunk in chunks], storage)
            self._compute_prompts(step, features, self._kept.before(chunks, features), storage)
        self._kept.keep(step, features, has_prompts)

    def _compute_prompts(self, step: ComputedBatch, features: Tensor, before: Tensor, storage: KVStorage) -> None:
        """Compute the whole step, since it is one batch: decodes are computed again for the next draft.

        before [chunks, features]: those of the token before each chunk."""
        batch, attention = step.batch, step.attention
        places = [*zip(step.first_rows, step.plan.chunks, strict=False)]
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        firsts = sent([offset for offset, _ in places], previous.device)
        previous.index_copy_(0, firsts, before)
        if self.one_call is not None and attention.work(self.head.attention_layers[0]) is not None:
            prompts = [range(offset, offset + chunk.count) for offset, chunk in places if not chunk.decodes]
            rows = torch.tensor([row for some in prompts for row in some])
            positions, slots = batch.positions[rows], batch.layout.slot_mapping[rows]
            self.head.store(batch.tokens[rows], previous[rows], positions, slots, storage)
        else:
            self.head.store_keys(batch.tokens, self.head.join(previous), batch.positions, attention)

    def forget(self, request_id: str) -> None:
        self.states.forget(request_id)


class HeadCalls:
    """A head whose kernel drafts all tokens of a step in one call."""

    def __init__(self, head: DraftHead, states: KeptStates) -> None:
        self._head, self._states = head, states

    def catch_up(self, tasks: Sequence[DraftTask], storage: KVStorage) -> bool:
        """Compute the tokens of a pause, except the last ones, in one call; return whether there were any."""
        size = storage.block_size
        rows: list[tuple[int, int, int]] = []  # token, position, slot
        spans: list[tuple[Request, int]] = []
        for task in tasks:
            request, first, last = task.request, self._states.first_position(task.request), task.request.num_known - 1
            if last - first >= A_FEW:
                positions = range(first, last)
                rows += [(request.tokens[p], p, task.table[p // size] * size + p % size) for p in positions]
                spans.append((request, last - first))
        if rows:
            tokens, token_positions, slots = torch.tensor(rows).T.contiguous()
            self._head.store(tokens, self._states.take(spans), token_positions, slots, storage)
        return bool(rows)

    def draft(self, tasks: Sequence[DraftTask], storage: KVStorage) -> list[Draft]:
        """The likeliest draft tokens, in one call. The task of the greatest length comes first."""
        from chairlift.speculation.fused_head import HeadTask

        head_tasks: list[HeadTask] = []
        tokens: list[int] = []
        for task in tasks:
            start, end = self._states.first_position(task.request), task.request.num_known
            least = task.min_chance, task.min_chance_to_extend
            head_tasks.append(HeadTask(start, end, task.table, task.length, *least, task.chances))
            tokens += task.request.tokens[start:end]
        taken = [(task.request, one.end - one.start) for task, one in zip(tasks, head_tasks, strict=True)]
        return self._head.draft(head_tasks, tokens, self._states.take(taken), storage)

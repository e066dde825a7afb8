"""Draft tokens from a draft head, which reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:  # numba takes its time
    from chairlift.speculation.fused_head import FusedHead


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
        self.one_call: HeadCalls | None = None
        if head.fused_head is not None:
            self.one_call = HeadCalls(head, head.fused_head, self._kept)

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
            self.one_call.store(batch.tokens[rows], previous[rows], positions, slots, storage)
        else:
            self.head.store_keys(batch.tokens, self.head.join(previous), batch.positions, attention)

    def forget(self, request_id: str) -> None:
        self.states.forget(request_id)


class HeadCalls:
    """A head with a kernel that drafts all tokens of a step in one call."""

    def __init__(self, head: DraftHead, fused: FusedHead, states: KeptStates) -> None:
        self._embed, self._fused, self._states = head.target.embed, fused, states
        self._token_ids: list[int] = head.token_ids.tolist()

    def catch_up(self, tasks: Sequence[DraftTask], storage: KVStorage) -> bool:
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
            self.store(tokens, self._states.take(spans), token_positions, slots, storage)
        return bool(rows)

    def draft(self, tasks: Sequence[DraftTask], storage: KVStorage) -> list[Draft]:
        starts = [self._states.first_position(task.request) for task in tasks]
        tokens: list[int] = []
        for task, start in zip(tasks, starts, strict=True):
            tokens += task.request.tokens[start:]
        counts = [task.request.num_known - start for task, start in zip(tasks, starts, strict=True)]
        features = self._states.take([(task.request, count) for task, count in zip(tasks, counts, strict=True)])
        embedded = self._embed(torch.tensor(tokens)).numpy()
        choices = self._fused.draft(tasks, starts, embedded, features.numpy(), storage)
        drafts = zip(choices.tokens.tolist(), choices.levels.tolist(), choices.kept.tolist(), strict=True)
        ids = self._token_ids
        return [Draft([ids[token] for token in some[:kept]], levels[:kept]) for some, levels, kept in drafts]

    def store(self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, storage: KVStorage) -> None:
        """Store the keys and values of tokens [T] behind which nothing is drafted."""
        embedded = self._embed(tokens).numpy()
        self._fused.store(embedded, features.numpy(), positions.numpy(), slots.numpy(), storage)

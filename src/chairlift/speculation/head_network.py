"""A draft head as a network that guesses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.attention.base import Attend, HostAttend
from chairlift.attention.input_batch import InputBatch
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.plan import Chunk
from chairlift.core.request import Request, Status
from chairlift.speculation.control.controller import Wanted
from chairlift.speculation.draft_head import DraftHead, Guesses
from chairlift.speculation.networks import A_FEW, ComputedBatch

MOST_STATES = 64  # of a request, that wait for its draft head


class Head:
    """A draft head. It computes prompts when the target does, for they stay in the prefix cache. Of what is generated,
    the target's states are kept until guesses are asked for; while guesses sleep they are not, and what was written
    meanwhile the head will never know.

    Every block is cleared when its first token is written. So what the head does not know of a text is zeros to it, or
    a guess that was wrong, but never what another request left there; also to those that share or copy the block. (With
    zeros, guesses are a little better than if it looked at nothing but the tokens that it knows.)"""

    in_parts = False  # all that it has states for, or nothing

    def __init__(self, head: DraftHead) -> None:
        self.token_ids: Tensor | None = head.token_ids
        self.one_call = head.guesses_in_one_call  # whether it has `guess`
        self._head = head
        self.asleep = False
        self._ahead: dict[str, _Ahead] = {}  # by request id
        self._guessed: dict[str, Tensor] = {}  # by request id: the head's own state of the last guess

    def first_position(self, request: Request) -> int:
        ahead = self._ahead.get(request.id)
        if ahead is None or ahead.end != request.num_known:
            return request.num_known - 1  # it has just come back: the token has to do
        return min(ahead.first, request.num_known - 1)

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        head = self._head
        size = head.hidden_size if chunks[0].drafts else head.feature_size  # if one has drafts, all of them have some
        previous = torch.zeros(len(batch.tokens), size, dtype=head.target.dtype, device=batch.tokens.device)
        if chunks[0].drafts:
            previous[last_rows] = torch.stack([self._guessed[chunk.request.id] for chunk in chunks])
        else:
            places = [*zip(batch.layout.offsets, chunks, strict=False)]
            rows = [row for offset, chunk in places for row in range(offset, offset + chunk.count)]
            # Who catches up leaves out the last token, which comes with the first guess.
            known = [self._take(one.request, one.start, one.request.num_known)[: one.count] for one in chunks]
            previous.index_copy_(0, sent(rows, previous.device), torch.cat(known))
            previous = head.join(previous)
        states = head.states(batch.tokens, previous, batch.positions, attend)[last_rows]
        for chunk, state in zip(chunks, states, strict=True):
            self._guessed[chunk.request.id] = state
        return head.scores(states)

    def catch_up(self, wanted: Sequence[Wanted], storage: KVStorage) -> bool:
        """If it guesses in one call: take in what requests got while they got no guesses, but for their last tokens.
        Whether there was any."""
        size = storage.block_size
        rows: list[tuple[int, int, int]] = []  # token, position, slot
        features: list[Tensor] = []
        for one in wanted:
            request, first, last = one.request, self.first_position(one.request), one.request.num_known - 1
            if last - first >= A_FEW:
                places = range(first, last)
                rows += [(request.tokens[p], p, one.table[p // size] * size + p % size) for p in places]
                features.append(self._take(request, first, last + 1)[:-1])
        if rows:
            tokens, positions, slots = torch.tensor(rows).T.contiguous()
            self._head.remember(tokens, torch.cat(features), positions, slots, storage)
        return bool(rows)

    def guess(
        self, wanted: Sequence[Wanted], chances: Sequence[Sequence[float]], storage: KVStorage
    ) -> tuple[list[Guesses], float | None]:
        """The likeliest guesses, all in one call, and what each but the first took. Who wants most comes first.
        `chances`: of each request, how often a guess is right that the head is so sure of."""
        from chairlift.speculation.fused_head import Asked

        asked: list[Asked] = []
        tokens: list[int] = []
        features: list[Tensor] = []
        for one, known in zip(wanted, chances, strict=True):
            start, end = self.first_position(one.request), one.request.num_known
            asked.append(Asked(start, end, one.table, one.length, one.least, one.least_to_go_on, known))
            tokens += one.request.tokens[start:end]
            features.append(self._take(one.request, start, end))
        return self._head.guess(asked, tokens, features[0] if len(features) == 1 else torch.cat(features), storage)

    def _take(self, request: Request, start: int, end: int) -> Tensor:
        """What the target knew before each of these tokens [tokens, features]; zeros where that is not known."""
        ahead, head = self._ahead.get(request.id), self._head
        if ahead is not None and (ahead.first, ahead.end) == (start, end):
            found = ahead.states()
        else:
            found = torch.zeros(end - start, head.feature_size, dtype=head.target.dtype, device=head.target.device)
        # Its last token is computed once more next time: a step with prompts may compute it without its state.
        self._ahead[request.id] = _Ahead(request, end - 1, found[-1:])
        return found

    def follow(self, step: ComputedBatch) -> None:
        self._clear_new_blocks(step)
        chunks = step.plan.chunks
        has_prompts = not all(chunk.decodes for chunk in chunks)
        # States are parts of whole steps', which whoever has had to leave would keep in memory. Others only sit out.
        for ahead in [ahead for ahead in self._ahead.values() if ahead.request.status is not Status.RUNNING]:
            self.forget(ahead.request.id)
        if self.asleep:
            for chunk in chunks:
                if chunk.decodes:
                    self.forget(chunk.request.id)
        if has_prompts or not self.asleep:
            self._take_in(step, has_prompts)

    def bytes_kept(self, num_requests: int) -> int:
        """Those of steps that only decode are kept whole, with rows that are nobody's: `num_requests` is with those."""
        return MOST_STATES * num_requests * self._head.feature_size * self._head.target.dtype.itemsize

    def _clear_new_blocks(self, step: ComputedBatch) -> None:
        size = step.storage.block_size
        begun: list[int] = []
        for chunk in step.plan.chunks:
            if chunk.count > 1 or chunk.start % size == 0:
                begun += chunk.table[-(-chunk.start // size) : -(-chunk.end // size)]
        if begun:
            step.storage.clear(self._head.attention_layers[0].index, begun)

    def _take_in(self, step: ComputedBatch, has_prompts: bool) -> None:
        chunks, offsets = step.plan.chunks, step.batch.layout.offsets
        features = self._head.features(step.hidden)
        if has_prompts:
            self._compute_prompts(step, features)
        rows = iter(step.kept)
        taken: list[tuple[Chunk, int]] = []  # with the position of the token that comes next
        spans: list[range] = []  # their rows
        for offset, chunk in zip(offsets, chunks, strict=False):
            last = next(rows) if chunk.samples else offset + chunk.count - 1
            if not (chunk.decodes and self.asleep):
                first = offset if self._goes_on(chunk) else last
                taken.append((chunk, chunk.start + last - offset + 1))
                spans.append(range(first, last + 1))
        # Of prompts only the last row is kept in memory, and of drafts those that were right: not all of the step.
        copies = has_prompts or step.plan.num_drafts > 0
        for (chunk, position), states in zip(taken, _cut(features, spans, copies), strict=True):
            if self._goes_on(chunk):
                self._ahead[chunk.request.id].append(states)
            else:
                self._ahead[chunk.request.id] = _Ahead(chunk.request, position, states)

    def _goes_on(self, chunk: Chunk) -> bool:
        """Whether its states follow on those that wait for the head."""
        ahead = self._ahead.get(chunk.request.id)
        return chunk.decodes and ahead is not None and ahead.end == chunk.start + 1

    def _compute_prompts(self, step: ComputedBatch, features: Tensor) -> None:
        """All of the step, for it is one batch: what decodes is computed once more when it is asked for guesses."""
        batch, attend = step.batch, step.attend
        places = [*zip(batch.layout.offsets, step.plan.chunks, strict=False)]
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        known: dict[int, Tensor] = {}  # by row
        for offset, chunk in places:
            ahead = self._ahead.get(chunk.request.id)
            if ahead is not None and (ahead.first, ahead.end) == (chunk.start, chunk.start + 1):
                known[offset] = ahead.states()
        unknown = [offset for offset, _ in places if offset not in known]  # such as behind a prefix hit
        if unknown:
            previous.index_fill_(0, sent(unknown, previous.device), 0.0)
        if known:
            previous.index_copy_(0, sent([*known], previous.device), torch.cat([*known.values()]))
        if self.one_call and isinstance(attend, HostAttend):
            prompts = [range(offset, offset + chunk.count) for offset, chunk in places if not chunk.decodes]
            rows = torch.tensor([row for some in prompts for row in some])
            positions, slots = batch.positions[rows], batch.layout.slots[rows]
            self._head.remember(batch.tokens[rows], previous[rows], positions, slots, step.storage)
        else:
            self._head.states(batch.tokens, self._head.join(previous), batch.positions, attend)

    def forget(self, request_id: str) -> None:
        self._ahead.pop(request_id, None)
        self._guessed.pop(request_id, None)


def _cut(features: Tensor, spans: Sequence[range], copies: bool) -> Sequence[Tensor]:
    """These rows; with `copies` in memory of their own. One for all: each would be a launch."""
    if not copies:
        return [features[span.start : span.stop] for span in spans]
    rows = sent([row for span in spans for row in span], features.device)
    copied: Sequence[Tensor] = features.index_select(0, rows).split([len(span) for span in spans])
    return copied


class _Ahead:
    """What a draft head has to catch up with: its first token that is not computed, and for that and all later ones
    what the target knew before it."""

    def __init__(self, request: Request, first: int, states: Tensor) -> None:
        self.request = request
        self.first = first
        self.end = first + len(states)
        self._parts = deque([states])  # [tokens, features] each, as they came: joining them would copy all at each step

    def states(self) -> Tensor:
        """[end - first, features]."""
        return self._parts[0] if len(self._parts) == 1 else torch.cat([*self._parts])

    def append(self, states: Tensor) -> None:
        """Of the oldest, some are forgotten. Guesses are worth less for the gap, but after so long it is not known
        whether any are wanted."""
        self._parts.append(states)
        self.end += len(states)
        while self.end - self.first > MOST_STATES:
            self.first += len(self._parts.popleft())

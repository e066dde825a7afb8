"""The networks that guess: the model's own first layers, a smaller model, or a draft head.

Their keys and values are stored under the same block tables as the target's, as further layers of the same storage
(the first layers of the model even share its own). So whatever happens to a request's blocks, be it a prefix hit, a
copy on write, a swap or a roll-back, happens to both, and there is nothing to account for twice. Should a draft's keys
and values ever be stale, its guesses get worse; what comes out is never affected.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from chairlift.attention.base import Attend, KVStorage
from chairlift.attention.paged_cpu import PagedCPUStep
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.speculation import Wanted
from chairlift.execution.input_batch import InputBatch
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculative.head import DraftHead, Guesses

MOST_STATES = 64  # of a request, that wait for its draft head


class DraftNetwork(Protocol):
    """What differs between the networks."""

    in_parts: bool  # whether it can catch up with a request in more than one step

    def first_position(self, request: Request) -> int:
        """The first of the request's tokens that the network has not computed yet."""
        ...

    token_ids: Tensor | None  # [R]: the tokens that it scores; None if those are the first R of the vocabulary

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        """Compute the batch, and score what may follow the last row of each chunk [chunks, R]."""
        ...

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        """The target has computed a step: its hidden states, and of each chunk that samples the row of the batch
        that the request's next token was sampled from."""
        ...

    def forget(self, request_id: str) -> None: ...


class FirstLayers:
    """The first layers of the target itself, with its norm and head. What they write for a draft is what the target
    writes there again when it verifies it."""

    in_parts = False  # it never has more than one token to catch up with

    def __init__(self, model: Decoder, num_layers: int) -> None:
        self.token_ids: Tensor | None = None
        self._model = copy.copy(model)
        self._model.use_layers(num_layers)

    def first_position(self, request: Request) -> int:
        return request.num_computed

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        return _scores(self._model, batch, last_rows, attend)

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class SmallModel:
    """Another model with the same tokenizer. It computes prompts when the target does, and the tokens of a request
    that got no drafts for a while when it is to get some again."""

    in_parts = True

    def __init__(self, model: CausalLM) -> None:
        self.token_ids: Tensor | None = None
        self._model = model
        self._computed: dict[str, int] = {}  # by request id: how many of its first tokens

    def first_position(self, request: Request) -> int:
        return min(self._computed.get(request.id, 0), request.num_computed)

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        for chunk in chunks:
            self._computed[chunk.request.id] = chunk.end
        return _scores(self._model, batch, last_rows, attend)

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        has_prompts = not all(chunk.decodes for chunk in plan.chunks)
        if has_prompts:
            self._model.hidden_states(batch.tokens, batch.positions, attend)
        rows = iter(kept)
        for offset, chunk in zip(batch.layout.offsets, plan.chunks, strict=False):
            computed = self._computed.get(chunk.request.id, 0)
            # Before a prompt's chunk are its other chunks, or cached blocks, which a request before it filled.
            if has_prompts and (not chunk.decodes or computed >= chunk.start):
                computed = chunk.end
            right = chunk.start + next(rows) - offset + 1 if chunk.samples else chunk.end
            self._computed[chunk.request.id] = min(computed, right)  # what it computed of wrong guesses is void

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)


class Head:
    """A draft head. It computes prompts when the target does. Of what is generated, the target's states are kept until
    guesses are asked for: a request that gets none costs nothing."""

    in_parts = False  # all that it has states for, or nothing

    def __init__(self, head: DraftHead) -> None:
        self.token_ids: Tensor | None = head.token_ids
        self.one_call = head.guesses_in_one_call  # whether it has `guess`
        self._head = head
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
            for offset, chunk in zip(batch.layout.offsets, chunks, strict=False):
                previous[offset : offset + chunk.count] = self._take(chunk.request, chunk.start, chunk.end)
            previous = head.join(previous)
        states = head.states(batch.tokens, previous, batch.positions, attend)[last_rows]
        for chunk, state in zip(chunks, states, strict=True):
            self._guessed[chunk.request.id] = state
        return head.scores(states)

    def guess(
        self, wanted: Sequence[Wanted], chances: Sequence[Sequence[float]], storage: KVStorage
    ) -> tuple[list[Guesses], float | None]:
        """The likeliest guesses, all in one call, and what each but the first took. Who wants most comes first.
        `chances`: of each request, how often a guess is right that the head is so sure of."""
        from chairlift.speculative.fused_head import Asked

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
        self._ahead[request.id] = _Ahead(end - 1, found[-1:])
        return found

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        features = self._head.features(hidden)
        has_prompts = not all(chunk.decodes for chunk in plan.chunks)
        if has_prompts:
            self._compute_prompts(plan, batch, attend, features)
        rows = iter(kept)
        for offset, chunk in zip(batch.layout.offsets, plan.chunks, strict=False):
            last = next(rows) if chunk.samples else offset + chunk.count - 1
            ahead = self._ahead.get(chunk.request.id)
            goes_on = chunk.decodes and ahead is not None and ahead.end == chunk.start + 1
            states = features[offset if goes_on else last : last + 1]
            if has_prompts:
                states = states.clone()  # so as not to keep all of the prompts' for them
            if ahead is not None and goes_on:
                ahead.append(states)
            else:
                self._ahead[chunk.request.id] = _Ahead(chunk.start + last - offset + 1, states)

    def _compute_prompts(self, plan: StepPlan, batch: InputBatch, attend: Attend, features: Tensor) -> None:
        """All of the step, for it is one batch: what decodes is computed once more when it is asked for guesses."""
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        for offset, chunk in zip(batch.layout.offsets, plan.chunks, strict=False):
            ahead = self._ahead.get(chunk.request.id)
            known = ahead is not None and (ahead.first, ahead.end) == (chunk.start, chunk.start + 1)
            previous[offset] = ahead.states()[0] if ahead is not None and known else 0.0  # behind a prefix hit: none
        if self.one_call and isinstance(attend, PagedCPUStep):
            places = zip(batch.layout.offsets, plan.chunks, strict=False)
            prompts = [range(offset, offset + chunk.count) for offset, chunk in places if not chunk.decodes]
            rows = torch.tensor([row for some in prompts for row in some])
            positions, slots = batch.positions[rows], batch.layout.slots[rows]
            self._head.remember(batch.tokens[rows], previous[rows], positions, slots, attend.storage)
        else:
            self._head.states(batch.tokens, self._head.join(previous), batch.positions, attend)

    def forget(self, request_id: str) -> None:
        self._ahead.pop(request_id, None)
        self._guessed.pop(request_id, None)


class _Ahead:
    """What a draft head has to catch up with: its first token that is not computed, and for that and all later ones
    what the target knew before it."""

    def __init__(self, first: int, states: Tensor) -> None:
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


def _scores(model: CausalLM, batch: InputBatch, last_rows: Tensor, attend: Attend) -> Tensor:
    return model.logits(model.hidden_states(batch.tokens, batch.positions, attend)[last_rows])

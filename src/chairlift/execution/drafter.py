"""Proposers that ask a network: the model's own first layers, a smaller model, or a draft head.

Their keys and values are stored under the same block tables as the target's, as further layers of the same storage
(the first layers of the model even share its own). So whatever happens to a request's blocks, be it a prefix hit, a
copy on write, a swap or a roll-back, happens to both, and there is nothing to account for twice. Should a draft's keys
and values ever be stale, its guesses get worse; what comes out is never affected.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from chairlift.attention import AttentionBackend, KVStorage
from chairlift.attention.base import Attend
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.randomness import uniform
from chairlift.core.request import Request
from chairlift.core.sampling import SamplingParams
from chairlift.core.speculation import Wanted
from chairlift.execution.few_threads import few_threads
from chairlift.execution.input_batch import InputBatch, build_batch
from chairlift.execution.sampler import COLDEST
from chairlift.execution.sampler_draw import draw, filter_weights
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculative.head import DraftHead

MAX_LENGTH = 7
MOST_STATES = 64  # of a request, that wait for its draft head
A_FEW = MAX_LENGTH + 1  # tokens that a network is behind a request after most steps
MOST_MISSED = 256  # tokens of requests further behind that a network catches up with in one step
_GAIN = 0.1  # how far one measurement moves the estimate of what a pass takes


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


class NetworkProposer:
    """Guesses for all requests at once, one pass of the network for each place."""

    max_length = MAX_LENGTH

    def __init__(
        self,
        name: str,
        network: DraftNetwork,
        attention: AttentionBackend,
        storage: KVStorage,
        target: CausalLM,
        *,
        draws: bool = True,
    ) -> None:
        """With `draws`, requests that are sampled without a seed of their own get guesses that are drawn, too: more of
        them can be kept, but which tokens come out then depends on which were guessed, and so on the batch. The others
        get the likeliest tokens."""
        self.name = name
        self.network = network
        self._target = target
        self._draws = draws
        self._drawn_from: dict[str, list[Tensor]] = {}  # of the last drafts, by request id
        self._attention = attention
        self._storage = storage
        self.spent = self.catching_up = 0.0
        self._pass_seconds: dict[int, float] = {}  # by the size of the batch, in powers of two

    def foresee(self, requests: Sequence[Request]) -> Sequence[int | None]:
        return [0] * len(requests)

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        with torch.inference_mode(), few_threads(self._target, self._attention):
            return self._propose(wanted)

    def _propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in wanted]
        self._drawn_from = {}
        self.catching_up = 0.0
        ready = self._catch_up(wanted) if self.network.in_parts else range(len(wanted))
        for place in range(max((wanted[index].length for index in ready), default=0)):
            asked = [index for index in ready if wanted[index].length > place]
            begun = time.perf_counter()
            found = self._pass([self._chunk(wanted[index], drafts[index]) for index in asked])
            if place:  # the first one may have more to compute than one token each
                self._note_seconds(len(asked), time.perf_counter() - begun)
            for index, token in zip(asked, found, strict=True):
                drafts[index].append(token)
        self.spent = time.perf_counter() - started if ready else self.catching_up
        return drafts

    def _catch_up(self, wanted: Sequence[Wanted]) -> list[int]:
        """The indices of those for whom the network can guess now. Others that got no guesses for long have to wait: it
        would have to compute so much that the step took too long. As much of that as fits is computed."""
        started = time.perf_counter()
        chunks = [self._chunk(one, ()) for one in wanted]
        room, ready, missed = MOST_MISSED, [], []
        for index, chunk in sorted(enumerate(chunks), key=lambda item: item[1].count):
            if chunk.count > A_FEW:
                count = min(chunk.count - 1, room)  # the last one comes with the first guess
                room -= count
                if count:
                    missed.append(replace(chunk, count=count))
                if count < chunk.count - 1:
                    break  # the others are still further behind
            ready.append(index)
        if missed:
            self._scores(missed)[:, 0].tolist()  # which waits for the device
            self.catching_up = time.perf_counter() - started
        return sorted(ready)

    def _chunk(self, one: Wanted, drafts: Sequence[int]) -> Chunk:
        request = one.request
        if not drafts:
            start = self.network.first_position(request)
            return Chunk(request, start, request.num_known - start, one.table, samples=False)
        start = request.num_known + len(drafts) - 1
        return Chunk(request, start, 1, one.table, samples=False, drafts=(drafts[-1],))

    def _pass(self, chunks: Sequence[Chunk]) -> list[int]:
        return self._choose(self._scores(chunks), chunks)

    def _scores(self, chunks: Sequence[Chunk]) -> Tensor:
        device = self._storage.keys[0].device
        plan = StepPlan(step=0, chunks=tuple(chunks))
        batch = build_batch(plan, self._storage, device, rectangular=self._attention.rectangular)
        rows = [offset + chunk.count - 1 for offset, chunk in zip(batch.layout.offsets, chunks, strict=False)]
        attend = self._attention.plan(batch.layout, self._storage)
        return self.network.scores(batch, chunks, torch.tensor(rows, device=device), attend)

    def _choose(self, scores: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        ids = self.network.token_ids
        tokens = scores.argmax(dim=-1)
        drawing = [index for index, chunk in enumerate(chunks) if self._is_drawn(chunk.request.params)]
        if drawing:
            requests = [chunks[index].request for index in drawing]
            weights = _probabilities(scores[drawing], [request.params for request in requests])
            places = [chunks[index].end - chunks[index].request.num_prompt for index in drawing]
            uniforms = [uniform(request.seed, place, stream=1) for request, place in zip(requests, places, strict=True)]
            tokens[drawing] = draw(weights, uniforms)
            for request, row in zip(requests, self._in_vocabulary(weights), strict=True):
                self._drawn_from.setdefault(request.id, []).append(row)
        chosen: list[int] = (tokens if ids is None else ids[tokens]).tolist()
        return chosen

    def _is_drawn(self, params: SamplingParams) -> bool:
        # A guess that a grammar forbids is left out before it is verified. Only the likeliest guess allows that: one
        # that was drawn would have to be refused, so that another is drawn from what is left.
        return self._draws and params.seed is None and params.structure is None and params.temperature >= COLDEST

    def _in_vocabulary(self, weights: Tensor) -> Tensor:
        """Over all tokens of the target: those that the network does not score have none."""
        whole = torch.zeros(len(weights), self._target.vocab_size, device=weights.device)
        if self.network.token_ids is None:
            whole[:, : weights.shape[1]] = weights
        else:
            whole[:, self.network.token_ids] = weights
        return whole

    def drawn_from(self, request_id: str) -> Tensor | None:
        """The probabilities [drafts, vocab] that the last drafts of a request were drawn with, if they were drawn."""
        found = self._drawn_from.get(request_id)
        return None if found is None else torch.stack(found)

    def _note_seconds(self, num_requests: int, seconds: float) -> None:
        size = num_requests.bit_length()
        before = self._pass_seconds.get(size, seconds)
        self._pass_seconds[size] = before + _GAIN * (min(seconds, 3 * before) - before)

    def seconds(self, num_requests: int, length: int) -> float:
        if not self._pass_seconds:
            return 0.0
        nearest = min(self._pass_seconds, key=lambda size: abs(size - num_requests.bit_length()))
        return length * self._pass_seconds[nearest]

    def forget(self, request_id: str) -> None:
        self.network.forget(request_id)


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
        self._head = head
        self._ahead: dict[str, _Ahead] = {}  # by request id
        self._guessed: dict[str, Tensor] = {}  # by request id: the head's own state of the last guess

    def first_position(self, request: Request) -> int:
        ahead = self._ahead.get(request.id)
        if ahead is None or ahead.first + len(ahead.states) != request.num_known:
            return request.num_known - 1  # it has just come back: the token has to do
        return min(ahead.first, request.num_known - 1)

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        head = self._head
        if chunks[0].drafts:  # then all of them have some
            size = (len(batch.tokens), head.hidden_size)
            previous = torch.zeros(size, dtype=head.target.dtype, device=batch.tokens.device)
            previous[last_rows] = torch.stack([self._guessed[chunk.request.id] for chunk in chunks])
        else:
            previous = head.join(self._features(batch, chunks))
        states = head.states(batch.tokens, previous, batch.positions, attend)[last_rows]
        for chunk, state in zip(chunks, states, strict=True):
            self._guessed[chunk.request.id] = state
        return head.scores(states)

    def _features(self, batch: InputBatch, chunks: Sequence[Chunk]) -> Tensor:
        """What the target knew before each token [T, features]; zeros where that is not known."""
        head = self._head
        size = (len(batch.tokens), head.feature_size)
        features = torch.zeros(size, dtype=head.target.dtype, device=batch.tokens.device)
        for offset, chunk in zip(batch.layout.offsets, chunks, strict=False):
            ahead = self._ahead.get(chunk.request.id)
            if ahead is not None and (ahead.first, len(ahead.states)) == (chunk.start, chunk.count):
                features[offset : offset + chunk.count] = torch.stack(ahead.states)
            # Its last token is computed once more next time: a step with prompts may compute it without its state.
            self._ahead[chunk.request.id] = _Ahead(chunk.end - 1, [features[offset + chunk.count - 1]])
        return features

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        features = self._head.features(hidden)
        if not all(chunk.decodes for chunk in plan.chunks):
            self._compute_prompts(plan, batch, attend, features)
        rows = iter(kept)
        for offset, chunk in zip(batch.layout.offsets, plan.chunks, strict=False):
            last = next(rows) if chunk.samples else offset + chunk.count - 1
            ahead = self._ahead.get(chunk.request.id)
            if not chunk.decodes or ahead is None or ahead.first + len(ahead.states) != chunk.start + 1:
                self._ahead[chunk.request.id] = _Ahead(chunk.start + last - offset + 1, [features[last].clone()])
                continue
            ahead.states += features[offset : last + 1].clone().unbind(0)
            ahead.forget_all_but(MOST_STATES)

    def _compute_prompts(self, plan: StepPlan, batch: InputBatch, attend: Attend, features: Tensor) -> None:
        """All of the step, for it is one batch: what decodes is computed once more when it is asked for guesses."""
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        for offset, chunk in zip(batch.layout.offsets, plan.chunks, strict=False):
            ahead = self._ahead.get(chunk.request.id)
            known = ahead is not None and len(ahead.states) == 1 and ahead.first == chunk.start
            previous[offset] = ahead.states[0] if ahead is not None and known else 0.0  # behind a prefix hit: none
        self._head.states(batch.tokens, self._head.join(previous), batch.positions, attend)

    def forget(self, request_id: str) -> None:
        self._ahead.pop(request_id, None)
        self._guessed.pop(request_id, None)


@dataclass(slots=True)
class _Ahead:
    """What a draft head has to catch up with: its first token that is not computed, and for that and all later ones the
    target's state of the token before."""

    first: int
    states: list[Tensor]

    def forget_all_but(self, most: int) -> None:
        """Guesses are worth less for the gap, but after so long it is not known whether any are wanted."""
        spare = len(self.states) - most
        if spare > 0:
            self.first += spare
            del self.states[:spare]


def _scores(model: CausalLM, batch: InputBatch, last_rows: Tensor, attend: Attend) -> Tensor:
    return model.logits(model.hidden_states(batch.tokens, batch.positions, attend)[last_rows])


def _probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """As the requests want their tokens drawn, but for penalties and the like: a guess need not be that good."""
    temperatures = torch.tensor([one.temperature for one in params], device=scores.device)
    weights = (scores.float().nan_to_num() / temperatures[:, None]).softmax(dim=-1)
    filter_weights(weights, params)
    return weights / weights.sum(dim=-1, keepdim=True)

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
from typing import Protocol

import torch
from torch import Tensor

from chairlift.attention import AttentionBackend, KVStorage
from chairlift.attention.base import Attend
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.speculation import Wanted
from chairlift.execution.input_batch import InputBatch, build_batch
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculative.head import DraftHead

MAX_LENGTH = 7
_GAIN = 0.1  # how far one measurement moves the estimate of what a pass takes


class DraftNetwork(Protocol):
    """What differs between the networks."""

    def first_position(self, request: Request) -> int:
        """The first of the request's tokens that the network has not computed yet."""
        ...

    def guess(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> list[int]:
        """Compute the batch, and guess the token after the last row of each chunk."""
        ...

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        """The target has computed a step: its hidden states, and of each chunk that samples the row of the batch
        that the request's next token was sampled from."""
        ...

    def forget(self, request_id: str) -> None: ...


class NetworkProposer:
    """Guesses for all requests at once, one pass of the network for each place."""

    max_length = MAX_LENGTH

    def __init__(self, name: str, network: DraftNetwork, attention: AttentionBackend, storage: KVStorage) -> None:
        self.name = name
        self.network = network
        self._attention = attention
        self._storage = storage
        self.spent = 0.0
        self._pass_seconds: dict[int, float] = {}  # by the size of the batch, in powers of two

    def foresee(self, requests: Sequence[Request]) -> Sequence[int | None]:
        return [0] * len(requests)

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in wanted]
        for place in range(max(one.length for one in wanted)):
            asked = [index for index, one in enumerate(wanted) if one.length > place]
            begun = time.perf_counter()
            found = self._pass([self._chunk(wanted[index], drafts[index]) for index in asked])
            if place:  # the first one may have more to compute than one token each
                self._note_seconds(len(asked), time.perf_counter() - begun)
            for index, token in zip(asked, found, strict=True):
                drafts[index].append(token)
        self.spent = time.perf_counter() - started
        return drafts

    def _chunk(self, one: Wanted, drafts: Sequence[int]) -> Chunk:
        request = one.request
        if not drafts:
            start = self.network.first_position(request)
            return Chunk(request, start, request.num_known - start, one.table, samples=False)
        start = request.num_known + len(drafts) - 1
        return Chunk(request, start, 1, one.table, samples=False, drafts=(drafts[-1],))

    def _pass(self, chunks: Sequence[Chunk]) -> list[int]:
        device = self._storage.keys[0].device
        plan = StepPlan(step=0, chunks=tuple(chunks))
        batch = build_batch(plan, self._storage, device, rectangular=self._attention.rectangular)
        rows = [offset + chunk.count - 1 for offset, chunk in zip(batch.layout.offsets, chunks, strict=False)]
        attend = self._attention.plan(batch.layout, self._storage)
        return self.network.guess(batch, chunks, torch.tensor(rows, device=device), attend)

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

    def __init__(self, model: Decoder, num_layers: int) -> None:
        self._model = copy.copy(model)
        self._model.layers = model.layers[:num_layers]

    def first_position(self, request: Request) -> int:
        return request.num_computed

    def guess(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> list[int]:
        return _greedy(self._model, batch, last_rows, attend)

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class SmallModel:
    """Another model with the same tokenizer. It computes prompts when the target does, and the tokens of a request
    that got no drafts for a while when it gets some again."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._computed: dict[str, int] = {}  # by request id: how many of its first tokens

    def first_position(self, request: Request) -> int:
        return min(self._computed.get(request.id, 0), request.num_computed)

    def guess(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> list[int]:
        for chunk in chunks:
            self._computed[chunk.request.id] = chunk.end
        return _greedy(self._model, batch, last_rows, attend)

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        if all(chunk.decodes for chunk in plan.chunks):
            return
        self._model.hidden_states(batch.tokens, batch.positions, attend)
        for chunk in plan.chunks:
            # Before a prompt's chunk are its other chunks, or cached blocks, which a request before it filled.
            if not chunk.decodes or self.first_position(chunk.request) >= chunk.start:
                self._computed[chunk.request.id] = chunk.end

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)


class Head:
    """A draft head. It computes all that the target computes, from the target's states, and guesses from there."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        # By request id: a position, and the state of the token before it, as the target and as the head computed it.
        self._known: dict[str, tuple[int, Tensor]] = {}
        self._guessed: dict[str, tuple[int, Tensor]] = {}

    def first_position(self, request: Request) -> int:
        return request.num_known - 1

    def guess(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> list[int]:
        head = self._head
        previous = torch.zeros(len(batch.tokens), head.hidden_size, dtype=head.target.dtype, device=batch.tokens.device)
        for offset, chunk in zip(batch.layout.offsets, chunks, strict=False):
            self._recall(self._guessed if chunk.drafts else self._known, chunk, previous[offset])
        states = head.states(batch.tokens, previous, batch.positions, attend)[last_rows]
        for chunk, state in zip(chunks, states, strict=True):
            self._guessed[chunk.request.id] = chunk.end, state
        tokens: list[int] = head.guess(states).tolist()
        return tokens

    def _recall(self, states: dict[str, tuple[int, Tensor]], chunk: Chunk, place: Tensor) -> None:
        """Write the state before `chunk` to its place. Behind a prefix hit there is none: the token has to do."""
        position, state = states.get(chunk.request.id, (-1, None))
        if state is not None and position == chunk.start:
            place.copy_(state)
        else:
            place.zero_()

    def follow(self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: Tensor, kept: Sequence[int]) -> None:
        previous = torch.zeros_like(hidden)
        previous[1:] = hidden[:-1]
        offsets = batch.layout.offsets
        for offset, chunk in zip(offsets, plan.chunks, strict=False):
            self._recall(self._known, chunk, previous[offset])
        self._head.states(batch.tokens, previous, batch.positions, attend)
        rows = iter(kept)
        for offset, chunk in zip(offsets, plan.chunks, strict=False):
            row = next(rows) if chunk.samples else offset + chunk.count - 1
            self._known[chunk.request.id] = chunk.start + row - offset + 1, hidden[row].clone()

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._guessed.pop(request_id, None)


def _greedy(model: CausalLM, batch: InputBatch, last_rows: Tensor, attend: Attend) -> list[int]:
    hidden = model.hidden_states(batch.tokens, batch.positions, attend)
    tokens: list[int] = model.logits(hidden[last_rows]).argmax(dim=-1).tolist()
    return tokens

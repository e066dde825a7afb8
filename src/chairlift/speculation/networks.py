"""The networks that guess: the model's own first layers, a smaller model, or a draft head (draft_head.py).

Their keys and values are stored under the same block tables as the target's, as further layers of the same storage
(the first layers of the model even share its own). So whatever happens to a request's blocks, be it a prefix hit, a
copy on write, a swap or a roll-back, happens to both, and there is nothing to account for twice. Should a draft's keys
and values ever be stale, its guesses get worse; what comes out is never affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from chairlift.attention.base import Attend
from chairlift.attention.input_batch import InputBatch
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.models.base import CausalLM, HiddenStates
from chairlift.models.decoder import Decoder

A_FEW = 8  # tokens that a network is behind a request after most steps


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A step that the target has computed."""

    plan: StepPlan
    batch: InputBatch
    attend: Attend
    hidden: HiddenStates
    accepted: Mapping[str, int]  # by request id: how many of its drafts were right
    storage: KVStorage

    @property
    def kept(self) -> list[int]:
        """Of each chunk that samples: the row that the request's next token was sampled from."""
        return [
            offset + chunk.count - chunk.num_scored + self.accepted.get(chunk.request.id, 0)
            for offset, chunk in zip(self.batch.layout.offsets, self.plan.chunks, strict=False)
            if chunk.samples
        ]


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

    def follow(self, step: ComputedBatch) -> None: ...

    def bytes_kept(self, num_requests: int) -> int:
        """Of a device, from step to step: of what so many requests may have waiting for it, beside the KV storage."""
        ...

    def forget(self, request_id: str) -> None: ...


class FirstLayers:
    """The first layers of the target itself, with its norm and head. What they write for a draft is what the target
    writes there again when it verifies it."""

    in_parts = False  # it never has more than one token to catch up with

    def __init__(self, model: Decoder, num_layers: int) -> None:
        self.token_ids: Tensor | None = None
        self._model = model.first_layers(num_layers)

    def first_position(self, request: Request) -> int:
        return request.num_computed

    def scores(self, batch: InputBatch, chunks: Sequence[Chunk], last_rows: Tensor, attend: Attend) -> Tensor:
        return _scores(self._model, batch, last_rows, attend)

    def follow(self, step: ComputedBatch) -> None:
        pass

    def bytes_kept(self, num_requests: int) -> int:
        return 0

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

    def follow(self, step: ComputedBatch) -> None:
        plan, batch = step.plan, step.batch
        has_prompts = not all(chunk.decodes for chunk in plan.chunks)
        if has_prompts:
            nobodys = batch.sampled_rows[:0]  # all that is wanted are keys and values
            self._model.hidden_states(batch.tokens, batch.positions, step.attend, nobodys)
        rows = iter(step.kept)
        for offset, chunk in zip(batch.layout.offsets, plan.chunks, strict=False):
            computed = self._computed.get(chunk.request.id, 0)
            # Before a prompt's chunk are its other chunks, or cached blocks, which a request before it filled.
            if has_prompts and (not chunk.decodes or computed >= chunk.start):
                computed = chunk.end
            right = chunk.start + next(rows) - offset + 1 if chunk.samples else chunk.end
            self._computed[chunk.request.id] = min(computed, right)  # what it computed of wrong guesses is void

    def bytes_kept(self, num_requests: int) -> int:
        return 0

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)


def _scores(model: CausalLM, batch: InputBatch, last_rows: Tensor, attend: Attend) -> Tensor:
    return model.logits(model.hidden_states(batch.tokens, batch.positions, attend, last_rows).last)

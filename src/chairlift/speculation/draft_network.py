"""What draft models have in common, and what the runner needs of a proposer that runs one.

The keys and values of a draft model are stored under the same block tables as the target's, as further layers of the
same storage (the first layers of the target even share its own). So whatever happens to a request's blocks, be it a
prefix hit, a copy on write, a swap or a rollback, happens to both, and nothing is accounted for twice. If the keys and
values of a draft model are ever stale, its drafts get worse; the output is never affected.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.models.base import CausalLM, HiddenStates
from chairlift.models.decoder import Decoder
from chairlift.speculation.control.proposer import Proposer


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A step that the target has computed."""

    plan: StepPlan
    batch: StepBatch
    first_rows: Sequence[int]  # of each chunk in the batch
    attention: StepAttention
    hidden: HiddenStates
    accepted: Mapping[str, int]  # request id -> how many of its draft tokens were right
    storage: KVStorage

    @property
    def kept(self) -> list[int]:
        """For each chunk that samples, the row that the request's next token was sampled from."""
        return [
            offset + chunk.count - chunk.num_scored + self.accepted.get(chunk.request.id, 0)
            for offset, chunk in zip(self.first_rows, self.plan.chunks, strict=False)
            if chunk.samples
        ]


class ModelProposer(Proposer):
    """A proposer that the runner shows every computed step, and whose draft tokens may be sampled."""

    @abstractmethod
    def warm_up(self, request: Request) -> None:
        """Compile what is compiled on first use, with this request of few tokens in block 0."""

    @abstractmethod
    def observe_step(self, step: ComputedBatch) -> None:
        """Read what the target has computed; it is overwritten by the next step."""

    @abstractmethod
    def sampled_from(self, request_id: str) -> Tensor | None:
        """The probabilities [drafts, vocab] that the last draft tokens of a request were sampled with; None if they are
        the likeliest ones."""

    @abstractmethod
    def state_bytes(self, num_requests: int) -> int:
        """Device memory kept from step to step beside the KV storage, at most."""


class DraftPass(NamedTuple):
    """What a pass computes for N requests."""

    scores: Tensor  # [N, R], of what may follow the last token of each
    states: Tensor | None  # [N, ...]: what the next pass reads beside its tokens; None if nothing


class DraftNetwork(Protocol):
    """What differs between draft models.

    A request's draft begins with a pass over the known tokens that the network has not computed; each further pass
    computes one draft token. `first_pass` and `next_pass` launch the same kernels for the same sizes and read device
    memory only, so that they can be captured.
    """

    catches_up_in_parts: bool  # whether it can compute the tokens that it missed in more than one step
    token_ids: Tensor | None  # [R]: the tokens that it scores; None if those are the first R of the vocabulary
    feature_size: int  # numbers of the target that the first pass reads for each token; 0 for none

    def first_position(self, request: Request) -> int:
        """The first of the request's tokens that the network has not computed yet."""
        ...

    def scores(self, batch: StepBatch, chunks: Sequence[Chunk], last_rows: Tensor, attention: StepAttention) -> Tensor:
        """Compute the batch, and score what may follow the last row of each chunk [chunks, R]."""
        ...

    def begin_draft(self, tables: Sequence[Sequence[int]], storage: KVStorage) -> None:
        """Prepare the blocks of requests that are going to get drafts."""
        ...

    def first_pass(self, batch: StepBatch, features: Tensor, last_rows: Tensor, attention: StepAttention) -> DraftPass:
        """features [T, feature_size]; last_rows [N]: the last token of each request."""
        ...

    def next_pass(self, batch: StepBatch, states: Tensor | None, attention: StepAttention) -> DraftPass:
        """A batch of one draft token of each request; states: those of the pass before."""
        ...

    def drafted(self, request: Request, count: int) -> None:
        """All known tokens of the request and the first `count` of its draft tokens have been computed."""
        ...

    def observe_step(self, step: ComputedBatch) -> None: ...

    def state_bytes(self, num_requests: int) -> int: ...

    def forget(self, request_id: str) -> None: ...


class ModelPasses:
    """Passes of a network that is a model: it reads nothing but tokens."""

    feature_size = 0

    def __init__(self, model: CausalLM) -> None:
        self.token_ids: Tensor | None = None
        self._model = model

    def begin_draft(self, tables: Sequence[Sequence[int]], storage: KVStorage) -> None:
        pass

    def first_pass(self, batch: StepBatch, features: Tensor, last_rows: Tensor, attention: StepAttention) -> DraftPass:
        return DraftPass(self._scores(batch, attention, last_rows), None)

    def next_pass(self, batch: StepBatch, states: Tensor | None, attention: StepAttention) -> DraftPass:
        return DraftPass(self._scores(batch, attention), None)

    def drafted(self, request: Request, count: int) -> None:
        pass

    def scores(self, batch: StepBatch, chunks: Sequence[Chunk], last_rows: Tensor, attention: StepAttention) -> Tensor:
        return self._scores(batch, attention, last_rows)

    def _scores(self, batch: StepBatch, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        return self._model.logits(self._model.hidden_states(batch, attention, rows).last)


def require_decoder(model: CausalLM, speculate: str) -> Decoder:
    if not isinstance(model, Decoder):
        raise InvalidParameter("speculate", f"{speculate!r}: only ngram works with models that transformers runs")
    return model

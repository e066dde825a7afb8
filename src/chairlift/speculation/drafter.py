"""What a runner knows of drafts, and what a proposer knows of the network that makes them.

The keys and values of a draft model are stored under the same block tables as the target's, as further layers of the
same storage (the first layers of the target even share its own). So whatever happens to a request's blocks, be it a
prefix hit, a copy on write, a swap or a rollback, happens to both, and nothing is accounted for twice. If the keys and
values of a draft model are ever stale, its drafts get worse; the output is never affected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.kernels.graphs import Graphs
from chairlift.models.base import HiddenStates
from chairlift.speculation.proposers.base import Draft

if TYPE_CHECKING:  # it reads computed batches
    from chairlift.speculation.head_states import HeadStates, RecentStates


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A step that the target has computed."""

    plan: StepPlan
    batch: StepBatch
    first_rows: Sequence[int]  # The row of each chunk's first token.
    attention: StepAttention
    hidden: HiddenStates
    read_accepted: Callable[[], Mapping[str, int]]  # waits for the result of a step on a device

    @property
    def accepted(self) -> Mapping[str, int]:
        """How many of its draft tokens were right, by request id."""
        return self.read_accepted() if self.plan.num_drafts else {}

    @property
    def kept(self) -> list[int]:
        """For each chunk that samples, the row that the request's next token was sampled from."""
        accepted = self.accepted
        return [
            offset + chunk.count - chunk.num_scored + accepted.get(chunk.request.id, 0)
            for offset, chunk in zip(self.first_rows, self.plan.chunks, strict=False)
            if chunk.samples
        ]


class Drafter:
    """All that a runner knows of drafts; this one makes none."""

    layers: Sequence[AttentionLayer] = ()  # those of the draft network in the KV storage
    reads_rows: bool = False  # whether steps have to keep the hidden states of all rows
    graphs: Graphs[Any, Any] | None = None  # The passes that are captured.

    def attach(self, slots: Slots, max_drafts: int, has_room: Callable[[int], bool] | None) -> None:
        """Draft beside steps that are queued ahead on a device, at most `max_drafts` tokens for a request. `has_room`:
        whether there is memory for a capture of this size; None to launch all kernels one by one."""

    def begin(self, plan: StepPlan, first_rows: np.ndarray, views: Mapping[str, np.ndarray]) -> None:
        """Note what a step on a device begins, and write into its inputs `views` what `store` reads."""

    def store(
        self, batch: StepBatch, view: Mapping[str, Tensor], attention: StepAttention, hidden: HiddenStates
    ) -> None:
        """Keep what drafts need of a step, as kernels that read device memory only: they are part of its graph."""

    def after(self, step: ComputedBatch) -> None:
        """Read what the target has computed; it is overwritten by the next step."""

    def sampled_from(self, request_id: str) -> Tensor | None:
        """The probabilities [drafts, vocab] that the last draft tokens of a request were sampled with; None if they are
        the likeliest ones."""
        return None

    def warm_up(self, request: Request) -> None:
        """Compile what is compiled on first use, with this request of few tokens in block 0."""

    def release(self) -> int:
        """Free the memory that was allocated beside the KV storage, and return its size; no step may follow."""
        return 0

    def forget(self, request_id: str) -> None:
        """Drop all state of a request."""


@dataclass(slots=True)
class DraftTask:
    """A request that gets draft tokens, with room for them in its block table."""

    request: Request
    length: int
    table: Sequence[int]
    min_chance: float
    min_chance_to_extend: float
    chances: Sequence[float]


class DraftPass(NamedTuple):
    """What a pass computes for N requests."""

    scores: Tensor  # [N, R], of what may follow the last token of each
    states: Tensor | None  # [N, ...]: what the next pass reads beside its tokens; None if nothing


class DraftNetwork(ABC):
    """What differs between draft models.

    A request's draft begins with a pass over the known tokens that the network has not computed; each further pass
    computes one draft token. Passes launch the same kernels for the same sizes and read device memory only, so that
    they can be captured.
    """

    catches_up_in_parts = False  # whether it can compute the tokens that it missed in more than one step
    token_ids: Tensor | None = None  # [R]: the tokens that it scores; None if those are the first R of the vocabulary
    states: HeadStates | None = None  # those of the target that it reads beside tokens
    one_call: Any = None  # a kernel that drafts all tokens of a step, for `catch_up` and `draft`; None: there is none

    @abstractmethod
    def first_position(self, request: Request) -> int:
        """The first of the request's tokens that the network has not computed yet."""

    @abstractmethod
    def run_pass(
        self, batch: StepBatch, before: Tensor | None, last_rows: Tensor | None, attention: StepAttention
    ) -> DraftPass:
        """In the first pass of a draft, before [T, ...] are features of `states`, and last_rows [N] the last token of
        each request. In the others, a batch of one draft token of each request, they are the states of the pass before
        and None."""

    def attach(self, slots: Slots) -> RecentStates | None:
        """Keep the states that it reads on a device, where steps store them; None if it reads none."""
        return None

    def begin_draft(self, tables: Sequence[Sequence[int]], storage: KVStorage) -> None:  # noqa: B027
        """Prepare the blocks of requests that are going to get drafts."""

    def computed(self, request: Request, end: int) -> None:  # noqa: B027
        """The request's tokens before `end`, draft tokens among them, have been computed."""

    def catch_up(self, tasks: Sequence[DraftTask], storage: KVStorage) -> bool:
        """Compute the tokens of a pause in one call, except the last ones; return whether there were any."""
        raise NotImplementedError

    def draft(self, tasks: Sequence[DraftTask], storage: KVStorage) -> list[Draft]:
        """The likeliest draft tokens, in one call. The task of the greatest length comes first."""
        raise NotImplementedError

    def observe_step(self, step: ComputedBatch, storage: KVStorage) -> None:  # noqa: B027
        """Read what the target has computed."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """Drop all state of a request."""

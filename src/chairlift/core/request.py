"""A request: what is known of its tokens, and how much of that is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from chairlift.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chairlift.core.beam.group import BeamGroup


class Status(StrEnum):
    WAITING = "waiting"  # in the queue: new, or sent back to it by a preemption
    RUNNING = "running"  # on the batch: holds a seat and KV blocks
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request finished. `detail` is the stop token id or stop string, or the error's text."""

    reason: FinishReason
    detail: int | str | None = None
    parameter: str | None = None  # of the caller's, if the error is one that showed only after submission
    temporary: bool = False  # an accident: the same request may well succeed a moment later


def completion_ids(request_id: str, n: int) -> list[str]:
    """The ids of the `n` completions of one prompt, the first of them the prompt's own."""
    return [request_id, *(f"{request_id}#{index}" for index in range(1, n))]


class Request:
    """One sequence being generated.

    Its *known* tokens are the prompt and all that was generated; the first `num_computed` of them have their
    keys and values in the cache. That difference is all the scheduler looks at: a decode is one token behind,
    a prefill is many behind, a prefix hit starts further ahead.

    Steps may be planned before the results of earlier ones are in (on a GPU the next step is queued while one
    runs). `num_planned` therefore counts what is computed or under way, and `num_unread` the tokens that steps
    under way will have sampled: known to the device, not yet to us.

    Only the scheduler (and the KV accounting under it) changes a request; everyone else reads.
    """

    __slots__ = (
        "_tokens",
        "arrival",
        "block_digests",
        "deadline",
        "ending",
        "eos_ids",
        "generation",
        "group",
        "id",
        "leader",
        "max_new_tokens",
        "num_charged",
        "num_computed",
        "num_planned",
        "num_prompt",
        "num_slots",
        "num_unread",
        "order",
        "params",
        "priority",
        "ready",
        "salt",
        "seed",
        "starved",
        "status",
        "steps_in_flight",
        "tenant",
        "times_passed_over",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        arrival: float,
        seed: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        deadline: float | None = None,
        salt: str = "",
        leader: Request | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        assert prompt, "an empty prompt is refused before a request is made"
        assert max_new_tokens >= 1
        self.id = request_id
        self.order = -1  # place in the order of submission, given by the scheduler
        self.params = params
        self.arrival = arrival
        self.seed = seed
        self.eos_ids = eos_ids
        self.deadline = deadline
        self.salt = salt  # requests with different salts never share cached blocks
        self.leader = leader  # the sibling (n > 1) whose prompt blocks this one will share
        self.group: BeamGroup | None = None  # the beam search that it carries a beam of
        self.num_slots = 1  # that it takes on board; the first of a beam search takes those of all
        self.ready = params.structure is None  # else once its grammar is compiled
        self.priority = priority  # the lower, the sooner
        self.tenant = tenant  # whose share of the batch it uses
        self.num_prompt = len(prompt)
        self.max_new_tokens = max_new_tokens
        self._tokens = list(prompt)
        self.num_computed = 0
        self.num_planned = 0  # num_computed, and the tokens of steps under way
        self.num_unread = 0  # tokens that steps under way will add
        self.generation = 0  # counts its preemptions: results of steps planned before one are dropped
        self.status = Status.WAITING
        self.ending: Ending | None = None
        self.steps_in_flight = 0  # planned steps whose results have not been applied yet
        self.times_passed_over = 0  # boardings of others while this one was passed over
        self.starved = False  # overtaken too often: nobody may board before it
        self.num_charged = 0  # known tokens that its tenant has been charged for
        self.block_digests: list[bytes] = []  # prefix digests of the first full blocks, extended on demand

    @property
    def tokens(self) -> Sequence[int]:
        """All known tokens, prompt first."""
        return self._tokens

    @property
    def prompt(self) -> Sequence[int]:
        return self._tokens[: self.num_prompt]

    @property
    def output(self) -> Sequence[int]:
        return self._tokens[self.num_prompt :]

    @property
    def num_known(self) -> int:
        return len(self._tokens)

    @property
    def num_output(self) -> int:
        return len(self._tokens) - self.num_prompt

    @property
    def num_expected(self) -> int:
        """Known tokens, and those that steps under way will add."""
        return len(self._tokens) + self.num_unread

    @property
    def num_behind(self) -> int:
        """Tokens that still have to be computed. The last one that may be generated never is."""
        expected = len(self._tokens) + self.num_unread
        if self.num_unread and (self.params.structure is not None or self.group is not None):
            return 0  # which tokens may come next, or which come at all, is known only once the last ones are
        if expected - self.num_prompt >= self.max_new_tokens:
            return 0
        return max(0, expected - self.num_planned)  # drafts under way are planned beyond what is expected

    @property
    def decoding(self) -> bool:
        """One token behind, and that token is its own."""
        planned = self.num_planned  # asked of everybody several times a step: no detour over other properties
        return planned == len(self._tokens) + self.num_unread - 1 and planned >= self.num_prompt

    def start_from(self, num_computed: int) -> None:
        """Nothing is under way, and the first `num_computed` tokens are in the cache."""
        self.num_computed = self.num_planned = num_computed
        self.num_unread = 0

    def rewind(self) -> None:
        """Nothing is under way, and what was planned beyond the computed tokens turned out wrong."""
        self.num_planned = self.num_computed

    @property
    def companions(self) -> Sequence[Request]:
        """Those who leave the batch and end together: a beam search, or just this one."""
        return (self,) if self.group is None else self.group.members

    @property
    def least_new_tokens(self) -> int:
        """How many tokens it is certain to generate yet."""
        params = self.params
        may_stop = bool(params.stop_ids or params.stop_strings) or not params.ignore_eos
        certain = params.min_tokens if may_stop else self.max_new_tokens
        return max(1, certain - self.num_output)

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def continue_from(self, other: Request) -> None:
        """Carry on from the tokens of another beam instead of its own."""
        self._tokens = list(other._tokens)
        self.block_digests = list(other.block_digests)
        self.num_charged = other.num_charged
        self.generation += 1  # its block table is another

    def take_back_output(self) -> None:
        """Of the beams it has carried: what it is to stand for in the end is appended from the start."""
        del self._tokens[self.num_prompt :]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Those that end it by themselves."""
        return frozenset(self.params.stop_ids).union(() if self.params.ignore_eos else self.eos_ids)

    def ending_after(self, token: int) -> Ending | None:
        """The ending that `token`, just appended, brings by itself (stop strings are the text layer's)."""
        if token in self.params.stop_ids:
            return Ending(FinishReason.STOP, token)
        if token in self.eos_ids and not self.params.ignore_eos:
            return Ending(FinishReason.STOP)
        if len(self._tokens) - self.num_prompt >= self.max_new_tokens:
            return Ending(FinishReason.LENGTH)
        return None

    def __repr__(self) -> str:
        progress = f"{self.num_computed}/{self.num_known} computed"
        return f"Request({self.id!r}, {self.status}, prompt {self.num_prompt}, {progress})"

"""A request: its known tokens, and how many of them are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from chairlift.core.sampling.params import SamplingParams


class Status(StrEnum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # in the batch: holds a slot and KV blocks
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
    parameter: str | None = None  # the caller's parameter at fault, if the error shows only after submission
    temporary: bool = False  # the same request may succeed a moment later


def completion_ids(request_id: str, n: int) -> list[str]:
    """The ids of the `n` completions of one prompt; the first is the prompt's own id."""
    return [request_id, *(f"{request_id}#{index}" for index in range(1, n))]


class RequestGroup(ABC):
    """Requests that are admitted, preempted and finished together, such as the beams of one search."""

    members: Sequence[Request]
    leader: Request  # waits in the queue for all of them

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """How many candidates for the next token a step must return for each member."""

    @abstractmethod
    def blocks_to_join(self, block_size: int) -> int:
        """KV blocks that the other members will need beside those of the leader, for their known tokens."""

    @abstractmethod
    def regroup(self) -> None:
        """All members were preempted: from now on the leader waits for all of them again."""


class Request:
    """One sequence being generated.

    Its *known* tokens are the prompt and all that was generated; the first `num_computed` of them have their
    keys and values in the cache. That difference is all the scheduler looks at: a decode is one token behind,
    a prefill is many behind, a prefix hit starts further ahead.

    Steps may be planned before the results of earlier ones are read (on a GPU the next step is queued while one
    runs). `num_planned` therefore counts tokens that are computed or in flight, and `num_unread` the tokens that
    steps in flight will have sampled: known to the device, but not read yet.

    Only the scheduler (and the KV accounting below it) changes a request; all other code only reads it.
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
        self.group: RequestGroup | None = None  # the beam search that it belongs to
        self.num_slots = 1  # slots of the batch that it needs; the leader of a group needs those of all members
        self.ready = params.structure is None  # else once its grammar is compiled
        self.priority = priority  # the lower, the sooner
        self.tenant = tenant  # the tenant whose share of the batch it uses
        self.num_prompt = len(prompt)
        self.max_new_tokens = max_new_tokens
        self._tokens = list(prompt)
        self.num_computed = 0
        self.num_planned = 0  # num_computed plus the tokens of steps in flight
        self.num_unread = 0  # tokens that steps in flight will add
        self.generation = 0  # counts its preemptions: results of steps planned before the last one are dropped
        self.status = Status.WAITING
        self.ending: Ending | None = None
        self.steps_in_flight = 0  # planned steps whose results are not applied yet
        self.times_passed_over = 0  # admissions of other requests ahead of this one
        self.starved = False  # passed over too often: no request may be admitted before it
        self.num_charged = 0  # known tokens that its tenant has been charged for
        self.block_digests: list[bytes] = []  # prefix digests of its first full blocks, extended on demand

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
        """Known tokens plus those that steps in flight will add."""
        return len(self._tokens) + self.num_unread

    @property
    def num_behind(self) -> int:
        """Tokens that still have to be computed. The last one that may be generated never is."""
        expected = len(self._tokens) + self.num_unread
        if self.num_unread and (self.params.structure is not None or self.group is not None):
            return 0  # the next tokens depend on ones that are not read yet
        if expected - self.num_prompt >= self.max_new_tokens:
            return 0
        return max(0, expected - self.num_planned)  # drafts in flight are planned beyond what is expected

    @property
    def decoding(self) -> bool:
        """Whether it is one token behind, and that token was generated."""
        planned = self.num_planned  # read for every request several times a step: other properties would cost too much
        return planned == len(self._tokens) + self.num_unread - 1 and planned >= self.num_prompt

    def start_from(self, num_computed: int) -> None:
        """No step is in flight, and the first `num_computed` tokens are in the cache."""
        self.num_computed = self.num_planned = num_computed
        self.num_unread = 0

    def rewind(self) -> None:
        """No step is in flight, and what was planned beyond the computed tokens (drafts) was wrong."""
        self.num_planned = self.num_computed

    @property
    def companions(self) -> Sequence[Request]:
        """The requests that are preempted and finished together with this one, itself included."""
        return (self,) if self.group is None else self.group.members

    @property
    def least_new_tokens(self) -> int:
        """How many more tokens it will generate at least."""
        params = self.params
        may_stop = bool(params.stop_ids or params.stop_strings) or not params.ignore_eos
        certain = params.min_tokens if may_stop else self.max_new_tokens
        return max(1, certain - self.num_output)

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def continue_from(self, other: Request) -> None:
        """Replace its tokens by those of another beam of the same search."""
        self._tokens = list(other._tokens)
        self.block_digests = list(other.block_digests)
        self.num_charged = other.num_charged
        self.generation += 1  # its block table is replaced

    def clear_output(self) -> None:
        """Forget all generated tokens; a beam search appends the final ones at its end."""
        del self._tokens[self.num_prompt :]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset(self.params.stop_ids).union(() if self.params.ignore_eos else self.eos_ids)

    def ending_after(self, token: int) -> Ending | None:
        """The ending that the token just appended causes, if any; stop strings belong to the text layer."""
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

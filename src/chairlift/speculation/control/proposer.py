"""The interface between the controller and a source of draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chairlift.core.request import Request
from chairlift.core.sampling.params import MIN_TEMPERATURE

LEVELS = 10  # Confidence is measured in so many steps.
A_FEW = 8  # tokens that a draft model is behind a request after most steps; more are computed by a pass of their own


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of one request, each with a level of confidence from 0 to LEVELS - 1.

    A level begins as a probability of (level + 0.5) / LEVELS; the controller measures how often it is right.
    """

    tokens: Sequence[int]
    levels: Sequence[int]


@dataclass(slots=True)
class DraftTerms:
    """What the drafts of one step have to fulfil, the same for all requests."""

    max_length: int
    min_chance: float  # a draft token is verified if it is right, with all before it, with at least this probability
    min_chance_to_extend: float  # Another one is drafted after it with at least this probability.
    chances: Mapping[bool, Sequence[float]]  # greedy or not -> by level, how often a draft token is right
    reserve_blocks: Callable[[Request, int], Sequence[int] | None]
    did_extra_work: bool = False  # set by a proposer that caught up with a pause: the step is not typical
    was_prepared: bool = True  # set to False by one that did something for all later drafts, such as a capture

    def length(self, request: Request) -> int:
        """The most draft tokens for `request`: verifying them samples one more token, which is the last it may get."""
        return min(self.max_length, request.max_new_tokens - request.num_output - 1)

    def reserve(self, request: Request) -> Sequence[int] | None:
        """The block table of `request` with room for its drafts, for a proposer with KV entries; None if memory is
        short."""
        return self.reserve_blocks(request, self.length(request))

    def chances_for(self, request: Request) -> Sequence[float]:
        return self.chances[is_greedy(request)]


def is_greedy(request: Request) -> bool:
    return request.params.temperature < MIN_TEMPERATURE


class Proposer(ABC):
    """A source of draft tokens."""

    name: str
    max_length: int  # draft tokens of a request in one step

    @abstractmethod
    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft | None]:
        """At most `terms.length(request)` draft tokens to follow the known tokens of each request; None for none."""

    def observe(self, request: Request, proposed: int, accepted: int) -> None:  # noqa: B027
        """The first `accepted` of the `proposed` draft tokens that were verified for `request` were right."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """Drop all state of a finished request."""

    def expected_level(self, request: Request) -> int | None:
        """The confidence level to expect of a draft for a request whose last token is still being computed; None for no
        draft. It decides whether the next step is planned after that token is read. Optional."""
        return LEVELS - 1

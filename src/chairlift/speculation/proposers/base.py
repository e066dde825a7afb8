"""The interface between the controller and a source of draft tokens, and how a choice of `speculate` becomes one:
`NAME:ARGUMENT` is checked at once, weights are loaded later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.core.request import Request
from chairlift.core.sampling.params import MIN_TEMPERATURE
from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS

LEVELS = 10  # Confidence is measured in steps of a tenth.
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


@dataclass(frozen=True, slots=True)
class LoadedProposer:
    """A proposer before the KV cache is sized."""

    make: Callable[..., Proposer]  # (attention, storage, model, repeatable) -> the proposer
    layers: tuple[Any, ...] = ()  # the attention layers whose keys and values it adds to the KV cache
    weight_bytes: int = 0


class ProposerFactory(ABC):
    """What is registered in PROPOSERS, called with the argument behind the colon. Its module imports no torch."""

    argument: str = ""  # what must follow the colon, as help texts show it: N, PATH
    max_length: int  # draft tokens of a request in one step

    def __init__(self, argument: str) -> None:
        """Check the argument; raise InvalidParameter if it is none of this proposer's."""
        if argument:
            raise InvalidParameter("speculate", f"takes no argument here, got {argument!r:.100}")

    @abstractmethod
    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        """Load what drafts the tokens of `model` (a CausalLM)."""


class StandaloneProposer(ProposerFactory, Proposer):
    """A proposer that needs neither weights nor the KV cache, and so is its own factory."""

    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        return LoadedProposer(lambda *_: self)


def proposer_factory(speculate: object) -> ProposerFactory:
    if not isinstance(speculate, str):
        raise InvalidParameter("speculate", f"must be a name such as 'ngram', got {speculate!r:.100}")
    name, _, argument = speculate.partition(":")
    return PROPOSERS.get(name)(argument)


def speculate_forms() -> list[str]:
    """Every choice as it is written: NAME or NAME:ARGUMENT."""
    arguments = {name: PROPOSERS.get(name).argument for name in PROPOSERS.names()}
    return [f"{name}:{argument}" if argument else name for name, argument in arguments.items()]


def check_speculate(speculate: str | None, draft_length: int | None) -> None:
    if speculate is None:
        if draft_length is not None:
            raise InvalidParameter("draft_length", "only goes with speculate")
        return
    most = proposer_factory(speculate).max_length
    if draft_length is None:
        return
    if isinstance(draft_length, bool) or not isinstance(draft_length, int) or not 1 <= draft_length <= most:
        problem = f"must be an integer from 1 to {most} with {speculate!r:.100}, got {draft_length!r}"
        raise InvalidParameter("draft_length", problem)


def drafts_per_request(speculate: str | None, draft_length: int | None) -> int:
    """The most draft tokens of a request in one step."""
    return 0 if speculate is None else draft_length or proposer_factory(speculate).max_length

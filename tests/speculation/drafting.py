"""Proposers whose drafts are right as often as a test wants, and controllers that draft when a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.payoff import DraftPayoff
from chairlift.speculation.proposers.base import LEVELS, Draft, DraftTerms, Proposer
from tests.core.driving import deterministic_token

Continue = Callable[[Request, int], Sequence[int]]
"""The next tokens that a request would get without drafts, at most the given number."""
Pattern = Callable[[int], bool]
"""Whether something happens in a step, by its number."""


class RandomProposer(Proposer):
    """Right for a random stretch, then wrong; sometimes without a draft, or with a shorter one than allowed."""

    name, max_length = "random", 7

    def __init__(self, right: Continue, vocab: int = 997, seed: int = 0) -> None:
        self._right = right
        self._vocab = vocab
        self._random = random.Random(seed)

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft | None]:
        found: list[Draft | None] = []
        for request in requests:
            level = self._random.choice([5, 5, 9, None])
            tokens = [] if level is None else self._draft(request, terms.length(request))
            found.append(None if level is None else Draft(tokens, [level] * len(tokens)))
        return found

    def _draft(self, request: Request, most: int) -> list[int]:
        length = most if self._random.random() < 0.7 else self._random.randint(0, most)
        tokens = list(self._right(request, length))
        tokens += [self._random.randrange(self._vocab) for _ in range(length - len(tokens))]
        for place in range(self._random.randint(0, length), length):
            tokens[place] = self._random.randrange(self._vocab)
        return tokens


class FixedProposer(RandomProposer):
    """Always has as many draft tokens as allowed, those of `right`, with full confidence."""

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft | None]:
        lengths = [terms.length(request) for request in requests]
        return [
            Draft(list(self._right(request, length)), [LEVELS - 1] * length)
            for request, length in zip(requests, lengths, strict=True)
        ]


class PatternPayoff(DraftPayoff):
    """Allows drafts in the steps that a pattern names."""

    def __init__(self, drafts: Pattern) -> None:
        super().__init__()
        self._drafts, self._step = drafts, -1

    def allows_drafts(self, num_requests: int) -> bool:
        self._step += 1
        return self._drafts(self._step)


def draft_by_pattern(speculation: Any, drafts: Pattern) -> None:
    """Make a controller of a fixed draft length draft in some steps only."""
    assert isinstance(speculation, SpeculationController)
    speculation.payoff = PatternPayoff(drafts)
    speculation.may_pause = True


class LeastChance(SpeculationController):
    """Verifies draft tokens that are right with at least this probability, whatever they cost."""

    least = 0.0

    def _terms(self, *given: Any) -> DraftTerms | None:
        terms = super()._terms(*given)
        assert terms is not None
        terms.min_chance = self.least
        return terms


def fixed_length(proposer: Proposer, length: int, **options: Any) -> SpeculationController:
    return SpeculationController(proposer, draft_length=length, **options)


def terms(length: int, table: Sequence[int] = (), least: float = 0.0) -> DraftTerms:
    """Terms for a proposer that is called without a controller."""
    chances = [(level + 0.5) / LEVELS for level in range(LEVELS)]
    return DraftTerms(length, least, least, {True: chances, False: chances}, lambda request, length: table)


def decode_chunk(request: Request) -> Chunk:
    return Chunk(request, request.num_known - 1, 1, (), samples=True)


def continue_deterministically(request: Request, length: int) -> Sequence[int]:
    """The tokens that `run_plan` gives a request."""
    further = Request(request.id, request.tokens, request.params, max_new_tokens=99, arrival=0.0)
    for _ in range(length):
        further.append(deterministic_token(further))
    return further.tokens[request.num_known :]

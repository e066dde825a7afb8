"""How many drafts a request gets: as many as are likely enough to be right to be worth verifying.

One more draft costs what the cost model says of one more token in this step. If it is right (which needs all drafts
before it to be right), it saves a token of a later step: a share of the time of a step that only decodes. So a draft
pays if

    chance that it is right  >  seconds of one more token · tokens per second without drafts

The chance comes from what became of earlier drafts of the same kind, of this request and, while those are few, of all.
A large batch raises the right side, until no draft pays. What the model says is checked by the clock: draft_payoff.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.speculation.control.payoff import DraftPayoff

FIRST_GUESS = 0.6  # the chance of a draft while nothing is known
_MEMORY = 0.9  # a request's acceptance is remembered by about its last 10 verifications
_COMMON_MEMORY = 0.99
_WEIGHT_OF_OTHERS = 3.0  # what is known of all requests counts like so many drafts of this one
_SURPLUS = 1.25  # a draft must promise more than it costs: both are estimates
_PROBE_EVERY = 24  # a request whose drafts were wrong too often gets one again after so many steps
_LEARNING = 20  # steps before the cost model is believed
_TRIAL = 2  # drafts that are verified whatever they cost: what the second takes to guess is measured
_FIRST_TRY = 3  # drafts of a request in the first step of its size that has any; later ones may have more and more
_AT_MOST = 3.0  # times what a token costs: drafts cost more, but a clock may err
_SURE = 0.98  # no draft is more certain than that


class ProposerCost(Protocol):
    max_length: int
    judges: bool

    def seconds(self, num_requests: int, length: int) -> float: ...


@dataclass(slots=True)
class Acceptance:
    """How many drafts were judged (those behind a wrong one are not), and how many of them were right. Both fade."""

    judged: float = 0.0
    right: float = 0.0

    def add(self, judged: int, right: int, memory: float) -> None:
        self.judged = memory * self.judged + judged
        self.right = memory * self.right + right

    def chance(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.judged + weight)


class DraftLength(Protocol):
    """Decides how many drafts to ask for."""

    payoff: DraftPayoff  # what the clock says of steps with drafts and without
    least: float  # the chance that a draft of those chosen last must have at least
    least_to_go_on: float  # and with which another is worth guessing behind it

    def allows_drafts(self, num_requests: int) -> bool:
        """Whether there may be any in the next step, of so many requests. To be asked at most once for a step: pauses
        are counted by that."""
        ...

    def sleeps(self, num_requests: int) -> bool:
        """Whether there will be none for so long that nothing is to be prepared for them either. To be asked before
        `allows_drafts`."""
        ...

    def choose(
        self, candidates: Sequence[tuple[Request, int]], chunks: Collection[Chunk], proposer: ProposerCost
    ) -> Sequence[int]:
        """For each (request, kind of draft), given what the step carries otherwise. Also asked of requests whose last
        token is not known yet, to find out whether it is worth waiting for."""
        ...

    def learn(self, request_id: str, proposed: int, accepted: int) -> None: ...
    def forget(self, request_id: str) -> None: ...


class FixedLength:
    """As many as told, whatever becomes of them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.least = self.least_to_go_on = 0.0
        self.payoff = DraftPayoff()

    def allows_drafts(self, num_requests: int) -> bool:
        return True

    def sleeps(self, num_requests: int) -> bool:
        return False

    def choose(
        self, candidates: Sequence[tuple[Request, int]], chunks: Collection[Chunk], proposer: ProposerCost
    ) -> Sequence[int]:
        return [min(self.length, proposer.max_length)] * len(candidates)

    def learn(self, request_id: str, proposed: int, accepted: int) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class AdaptiveLength:
    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.least = self.least_to_go_on = 0.0
        self.payoff = DraftPayoff()
        self._common: dict[int, Acceptance] = {}  # by kind
        self._own: dict[str, dict[int, Acceptance]] = {}  # by request, then kind
        self._kind: dict[str, int] = {}  # of the drafts that each request got last
        self._unasked: dict[str, int] = {}  # steps since a request last got a draft

    def allows_drafts(self, num_requests: int) -> bool:
        return self.payoff.allows_drafts(num_requests)

    def sleeps(self, num_requests: int) -> bool:
        return self.payoff.sleeps(num_requests)

    def choose(
        self, candidates: Sequence[tuple[Request, int]], chunks: Collection[Chunk], proposer: ProposerCost
    ) -> Sequence[int]:
        decodes = [chunk for chunk in chunks if chunk.decodes]
        self._find_least(len(candidates), decodes, proposer)
        hope = self.least_to_go_on < 1.0
        begins = not any(request.num_unread for request, _ in candidates)
        if not hope and self.payoff.takes_trial(len(chunks), begins=begins):
            self.least = self.least_to_go_on = 0.0
            self._kind.update((request.id, kind) for request, kind in candidates)
            return [min(_TRIAL, proposer.max_length)] * len(candidates)
        if len(decodes) == len(chunks):  # of steps with prompts the clock knows nothing
            self.payoff.note_hope(len(chunks), hope)
        tried = self.payoff.slope(len(decodes)).count
        most = min(proposer.max_length, _FIRST_TRY + tried)
        lengths = [self._length(request, kind, most) for request, kind in candidates]
        if proposer.judges:  # then it is up to the proposer where to stop
            lengths = [most if length else 0 for length in lengths]
        for (request, kind), length in zip(candidates, lengths, strict=True):
            if length:
                self._kind[request.id] = kind
        return lengths

    def _length(self, request: Request, kind: int, most: int) -> int:
        threshold, chance = self.least_to_go_on, min(_SURE, self.chance(request.id, kind))
        if threshold >= 1.0:
            return 0
        length = min(most, int(math.log(threshold) / math.log(chance))) if threshold > 0 else most
        if length:
            self._unasked[request.id] = 0
            return length
        # Its text may have become easier to guess meanwhile; only a draft can tell. If its last token is not known yet
        # it can have none now, and so is due until it is.
        unasked = min(self._unasked.get(request.id, 0) + 1, _PROBE_EVERY)
        due = unasked == _PROBE_EVERY
        self._unasked[request.id] = 0 if due and not request.num_unread else unasked
        return int(due)

    def chance(self, request_id: str, kind: int) -> float:
        common = self._common.get(kind)
        prior = FIRST_GUESS if common is None else common.chance(FIRST_GUESS, _WEIGHT_OF_OTHERS)
        own = self._own.get(request_id, {}).get(kind)
        return prior if own is None else own.chance(prior, _WEIGHT_OF_OTHERS)

    def _find_least(self, num_candidates: int, decodes: Sequence[Chunk], proposer: ProposerCost) -> None:
        """The least chances that drafts must have: in the end what they cost, and to begin with enough of them to learn
        that."""
        step = StepShape(len(decodes), 0, sum(chunk.end for chunk in decodes), 0, len(decodes))
        seconds = self._cost.predict(step)
        if self._cost.num_observed < _LEARNING or seconds <= 0:
            self.least = self.least_to_go_on = FIRST_GUESS**3
            return
        more = replace(step, decode_tokens=step.decode_tokens + num_candidates)
        marginal = (self._cost.predict(more) - seconds) / num_candidates
        measured = self.payoff.slope(len(decodes)).value or 0.0
        marginal = max(marginal, min(measured, _AT_MOST * marginal))
        guessing = proposer.seconds(num_candidates, 1) / num_candidates
        tokens_per_second = len(decodes) / seconds
        self.least = _SURPLUS * marginal * tokens_per_second
        self.least_to_go_on = _SURPLUS * (marginal + guessing) * tokens_per_second

    def learn(self, request_id: str, proposed: int, accepted: int) -> None:
        kind = self._kind[request_id]
        judged = min(proposed, accepted + 1)
        self._common.setdefault(kind, Acceptance()).add(judged, accepted, _COMMON_MEMORY)
        self._own.setdefault(request_id, {}).setdefault(kind, Acceptance()).add(judged, accepted, _MEMORY)

    def forget(self, request_id: str) -> None:
        for known in (self._own, self._kind, self._unasked):
            known.pop(request_id, None)

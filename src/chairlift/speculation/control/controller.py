"""Speculation: guess the next tokens of a request, and have the model verify all of them in one step.

A proposer guesses; the scheduler adds the guesses, as drafts, to chunks of requests that decode; the executor says how
many of them the model would have chosen itself. Nothing that comes out depends on the guesses, only how many steps it
takes: a token that the model did not choose is never given out.

    known       ... the quick brown        computed up to "quick"
    drafts                        fox jumps under
    computed    brown fox jumps under      in one step, which scores what follows each
    accepted          fox jumps            "under" is wrong: the model says "over"
    known       ... the quick brown fox jumps over
    blocks      those that only "under" would have needed are given back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift.core.plan import Chunk, StepResult
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.state import SchedulerState
from chairlift.speculation.control.draft_length import DraftLength


@dataclass(frozen=True, slots=True)
class Wanted:
    """So many drafts are asked for; there is room for them behind the request's known tokens."""

    request: Request
    length: int
    table: Sequence[int]
    # The chance that a draft must have, as far as a proposer knows it: to be verified, once it is made; and for another
    # to be made behind it.
    least: float = 0.0
    least_to_go_on: float = 0.0


class Proposer(Protocol):
    """Where drafts come from."""

    name: str
    max_length: int
    judges: bool  # whether it leaves out what is less likely than wanted; so one may ask for more than is likely
    sleeps: bool  # whether in long pauses it takes no note of what is generated, and has to wake before it guesses
    asleep: bool  # set by the controller

    @property
    def spent(self) -> float:
        """Seconds that the last call of `propose` took."""
        ...

    @property
    def catching_up(self) -> float:
        """Of these, what went into tokens that requests got while they got no drafts. It comes once after a pause, and
        so says nothing about what drafts cost from step to step."""
        ...

    def foresee(self, requests: Sequence[Request]) -> Sequence[int | None]:
        """What kind of draft it has for each; kinds are told apart by how often they are right. None: it has none."""
        ...

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        """At most as many drafts as wanted, of those for whom it has foreseen some."""
        ...

    def seconds(self, num_requests: int, length: int) -> float:
        """What proposing so many drafts more for each of so many requests takes."""
        ...

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        """So many of the drafts that a request got last were verified, and so many were right."""
        ...

    def forget(self, request_id: str) -> None:
        """A request is over."""
        ...


@dataclass(frozen=True, slots=True)
class _Proposing:
    """The time spent on the drafts of a step, which is found again by its first chunk."""

    first_chunk: Chunk | None
    seconds: float = 0.0
    catching_up: float = 0.0


class SpeculationController:
    """Adds drafts to a step that is otherwise complete: they use what memory and budget the others leave."""

    def __init__(self, proposer: Proposer, length: DraftLength, most_drafts: int | None = None) -> None:
        """`most_drafts`: of all requests of a step together."""
        self.proposer = proposer
        self.length = length
        self.most_drafts = most_drafts
        # Whether the steps now are to have drafts. Then each is planned when the tokens of the one before are known, on
        # devices that could otherwise be given it sooner.
        self.drafting = False
        self._proposing = _Proposing(None)  # of the last step that any time went into drafts of

    def add_drafts(self, state: SchedulerState, plan: PlanBuilder) -> None:
        self.drafting = False
        if self.proposer.sleeps:
            self.proposer.asleep = self.length.sleeps(len(plan.chunks))
        # Blocks that are still to be copied to the host must not be given to drafts, which may be written before that.
        if plan.memory_was_short or plan.swap_outs or not plan.room:
            return
        if not self.length.allows_drafts(len(plan.chunks)):
            return
        requests = [chunk.request for chunk in plan.chunks.values() if _may_have_drafts(chunk, plan)]
        kinds = self.proposer.foresee(requests) if requests else ()
        candidates = [(request, kind) for request, kind in zip(requests, kinds, strict=True) if kind is not None]
        if not candidates:
            return
        lengths = self.length.choose(candidates, plan.chunks.values(), self.proposer)
        self.drafting = any(lengths)
        wanted = self._reserve(candidates, lengths, state, plan)
        if not wanted:
            return
        proposed = self.proposer.propose(wanted)
        for one, drafts in zip(wanted, proposed, strict=True):
            request = one.request
            if drafts:
                plan.add_drafts(request, drafts)
            if len(drafts) < one.length:
                state.kv.trim(request, request.num_planned + plan.count(request))
        first = next(iter(plan.chunks.values()))
        self._proposing = _Proposing(first, self.proposer.spent, self.proposer.catching_up)

    def _reserve(
        self,
        candidates: Sequence[tuple[Request, int]],
        lengths: Sequence[int],
        state: SchedulerState,
        plan: PlanBuilder,
    ) -> list[Wanted]:
        """Room for as many drafts as were chosen, where there is any: nobody gives way to a guess."""
        wanted = []
        room = plan.room if self.most_drafts is None else min(plan.room, self.most_drafts)
        # Where there is not room for all, everybody has a share: else the first would take it all, and in every step.
        share = max(lengths) if sum(lengths) <= room else max(1, room // sum(length > 0 for length in lengths))
        for (request, _), length in zip(candidates, lengths, strict=True):
            if request.num_unread:  # its last token is not known yet
                continue
            # A verified draft is followed by one more token, and that is the last that may be.
            length = min(length, share, room, request.max_new_tokens - request.num_output - 1)
            if length > 0 and state.kv.reserve(request, plan.count(request) + length) is not None:
                needed = self.length.least, self.length.least_to_go_on  # chances
                wanted.append(Wanted(request, length, state.kv.table(request), *needed))
                room -= length
        return wanted

    def observe(self, result: StepResult, seconds: float, waited: bool = False, typical: bool = True) -> float:
        """A step took so long. Returns how much of that went into running it and not into guessing. `waited`: it could
        have been planned before the tokens of the one before were known, but for guesses. That is part of their price,
        even if there were none in the end. `typical`: later steps of its kind will take about as long; others, such as
        one that a graph is captured in, say nothing about guesses.

        Guesses that a grammar has cut are not among its drafts, for the model did not see them. But they took their
        time, so that the step says nothing of those without speculation."""
        plan = result.plan
        for chunk in plan.chunks:
            if chunk.drafts:
                self._learn(chunk.request, len(chunk.drafts), result.accepted.get(chunk.request.id, 0))
        known, nothing = self._proposing, _Proposing(None)
        proposing = known if plan.chunks and plan.chunks[0] is known.first_chunk else nothing
        if typical and all(chunk.decodes for chunk in plan.chunks):
            accepted = sum(result.accepted.values())
            guessed = waited or plan.num_drafts > 0 or proposing.seconds > proposing.catching_up
            self.length.payoff.observe(
                len(plan.chunks),
                guessed,
                accepted,
                seconds,
                catching_up=proposing.catching_up,
                guessing=proposing.seconds,
                num_drafts=plan.num_drafts,
            )
        return seconds - proposing.seconds

    @property
    def speedup(self) -> float:
        return self.length.payoff.speedup

    def _learn(self, request: Request, proposed: int, accepted: int) -> None:
        if request.status is not Status.FINISHED:  # which is forgotten already
            self.length.learn(request.id, proposed, accepted)
        self.proposer.learn(request, proposed, accepted)

    def forget(self, request_id: str) -> None:
        self.length.forget(request_id)
        self.proposer.forget(request_id)


def _may_have_drafts(chunk: Chunk, plan: PlanBuilder) -> bool:
    """Only those whose blocks are as they will be: a proposer may read and write them before the copies of the step
    are made. And no beams: what comes after them is not for the sampler to say."""
    request = chunk.request
    if not chunk.decodes or chunk.copies or request.group is not None:
        return False
    return not any(swap.request is request for swap in plan.swap_ins)

"""Adds draft tokens to step plans: how many, and whether at all.

    known       ... the quick brown        computed up to "quick"
    drafts                        fox jumps under
    computed    brown fox jumps under      in one step, which scores what follows each
    accepted          fox jumps            "under" is wrong: the model samples "over"
    known       ... the quick brown fox jumps over
    blocks      those that only "under" would have needed are given back

One more draft token costs the time to draft it, and what one more row adds to a step. If it is right (which needs all
draft tokens before it to be right), it saves a token of a later step. So it pays if

    chance that it is right  >  seconds of one more draft token / seconds per token without drafts

A large batch raises the right side, until no draft token pays. All of it is measured, for each batch size: payoff.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

from chairlift.core.orderings.slack import due
from chairlift.core.plan import Chunk, PlanBuilder, StepResult
from chairlift.core.request import Request
from chairlift.core.scheduler.state import SchedulerState
from chairlift.errors import InvalidParameter
from chairlift.speculation.control.payoff import DraftPayoff, SpeculationTuning
from chairlift.speculation.proposers.base import LEVELS, Draft, DraftTerms, Proposer, is_greedy


@dataclass(slots=True)
class _Proposal:
    """The drafts of one step, which its result is compared with."""

    first_chunk: Chunk  # The step is recognized by it.
    seconds: float
    levels: dict[str, Sequence[int]]  # The confidence in draft tokens, by request id.
    did_extra_work: bool
    was_prepared: bool


@dataclass(eq=False)
class SpeculationController:
    """Uses the memory and the token budget that the rest of a step leaves."""

    proposer: Proposer
    _: KW_ONLY
    draft_length: int | None = None  # always propose as many, whether they pay or not
    max_drafts: int | None = None  # draft tokens of all requests of a step
    # How many of a structured request's draft tokens its grammar allows.
    num_allowed: Callable[[Request, Sequence[int]], int] | None = None
    tuning: SpeculationTuning = field(default_factory=SpeculationTuning)
    clock: Callable[[], float] = time.perf_counter
    drafting: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.draft_length is not None and self.draft_length > self.proposer.max_length:
            problem = f"{self.proposer.name} drafts at most {self.proposer.max_length} tokens, got {self.draft_length}"
            raise InvalidParameter("draft_length", problem)
        self.may_pause = self.draft_length is None  # while drafts do not pay
        self.payoff = DraftPayoff(self.tuning)
        # By whether the target takes its likeliest token: else it agrees less often with the likeliest draft token.
        self.calibration = {greedy: Calibration(self.tuning) for greedy in (True, False)}
        self._proposal: _Proposal | None = None
        self._pass_seconds: dict[int, float] = {}  # Time of the proposer, by the bit length of the number of requests.

    @property
    def speedup(self) -> float:
        return self.payoff.speedup

    def add_drafts(self, state: SchedulerState, plan: PlanBuilder) -> None:
        self.drafting = False
        self._proposal = None
        if not self._may_draft(plan):
            return
        requests = [chunk.request for chunk in plan.chunks.values() if _may_have_drafts(chunk, plan)]
        if not requests:
            return
        reserved: set[str] = set()

        def reserve(request: Request, length: int) -> Sequence[int] | None:
            if length < 1 or state.kv.reserve(request, plan.count(request) + length) is None:
                return None
            reserved.add(request.id)
            return state.kv.table(request)

        terms = self._terms(requests, plan.chunks.values(), reserve)
        if terms is None:
            return
        ready = [request for request in requests if not request.num_unread]
        if ready:
            self._propose(ready, terms, state, plan)
        for request in ready:
            if request.id in reserved:
                state.kv.trim(request, request.num_planned + plan.count(request))
        waiting = (request for request in requests if request.num_unread)
        self.drafting = self.drafting or any(self._expects_draft(request, terms) for request in waiting)

    def _may_draft(self, plan: PlanBuilder) -> bool:
        """Called once per step: pauses are counted by it."""
        # Blocks that are still to be copied to the host must not be given to drafts, which may be written before that.
        if plan.memory_was_short or plan.swap_outs or not plan.room:
            return False
        return not self.may_pause or self.payoff.allows_drafts(len(plan.chunks))

    def _expects_draft(self, request: Request, terms: DraftTerms) -> bool:
        level = self.proposer.expected_level(request)
        return level is not None and terms.chances_for(request)[level] >= terms.min_chance

    # ---- how many -------------------------------------------------------------------------------------------------

    def _terms(
        self,
        requests: Sequence[Request],
        chunks: Collection[Chunk],
        reserve: Callable[[Request, int], Sequence[int] | None],
    ) -> DraftTerms | None:
        """None if no draft token can pay, however sure it is."""
        chances = {greedy: known.chances for greedy, known in self.calibration.items()}
        if self.draft_length is not None:
            return DraftTerms(self.draft_length, 0.0, 0.0, chances, reserve)
        least = self._least_chances(len(requests), sum(chunk.decodes for chunk in chunks))
        return None if least is None else DraftTerms(self.proposer.max_length, *least, chances, reserve)

    def _least_chances(self, num_requests: int, num_decodes: int) -> tuple[float, float] | None:
        """The chances from which on a draft token is worth verifying, and worth drafting and verifying; None if no
        draft token can pay."""
        batch = self.payoff.batch(num_decodes)
        if not batch.plain.count:
            return None
        if batch.in_trial or batch.slope.value is None:
            return self.tuning.trial_chance, self.tuning.trial_chance
        token_seconds = batch.plain.value
        drafting = self._seconds_per_pass(num_requests) / num_requests
        if batch.slope.value + drafting >= token_seconds:
            self.payoff.pause(batch)
            return None
        return batch.slope.value / token_seconds, (batch.slope.value + drafting) / token_seconds

    # ---- drafting -------------------------------------------------------------------------------------------------

    def _propose(
        self, requests: Sequence[Request], terms: DraftTerms, state: SchedulerState, plan: PlanBuilder
    ) -> None:
        start = self.clock()
        proposed = self.proposer.propose(requests, terms)
        seconds = self.clock() - start
        self.drafting = any(draft is not None for draft in proposed)
        drafts = [
            (each, self._kept(each, draft, terms)) for each, draft in zip(requests, proposed, strict=True) if draft
        ]
        limits = (plan.room, self.max_drafts, None if state.kv.states is None else state.kv.states.draft_room)
        room = min(limit for limit in limits if limit is not None)
        share = room
        if sum(len(draft.tokens) for _, draft in drafts) > room:
            if any(request.targets.given for request, _ in drafts):
                drafts.sort(key=lambda item: due(item[0]))  # The later a request is, the sooner it gets what it can.
            else:
                # Each gets a share: else the first request would take it all, and in every step.
                share = max(1, room // sum(bool(draft.tokens) for _, draft in drafts))
        levels: dict[str, Sequence[int]] = {}
        for request, draft in drafts:
            tokens = draft.tokens[: min(share, room)]
            if tokens and state.kv.reserve(request, plan.count(request) + len(tokens)) is not None:
                plan.add_drafts(request, tokens)
                levels[request.id] = draft.levels
                room -= len(tokens)
        if not terms.did_extra_work and terms.was_prepared and drafts:
            self._note_pass([draft for draft in proposed if draft is not None], seconds, terms)
        if self.drafting or terms.did_extra_work:
            first = next(iter(plan.chunks.values()))
            self._proposal = _Proposal(first, seconds, levels, terms.did_extra_work, terms.was_prepared)

    def _kept(self, request: Request, draft: Draft, terms: DraftTerms) -> Draft:
        """The draft tokens that are likely enough, and that a grammar allows."""
        chances, likely, kept = terms.chances_for(request), 1.0, 0
        for level in draft.levels[: terms.length(request)]:
            likely *= chances[level]
            if likely < terms.min_chance:
                break
            kept += 1
        tokens = draft.tokens[:kept]
        if tokens and self.num_allowed is not None and request.params.structure is not None:
            tokens = tokens[: self.num_allowed(request, tokens)]
        return Draft(tokens, draft.levels[: len(tokens)])

    def _note_pass(self, drafts: Sequence[Draft], seconds: float, terms: DraftTerms) -> None:
        """A pass drafts one token for each request; the last pass may have drafted what was not likely enough."""
        passes = max(min(len(draft.tokens) + 1, terms.max_length) for draft in drafts)
        size = len(drafts).bit_length()
        before = self._pass_seconds.get(size, seconds / passes)
        self._pass_seconds[size] = before + self.tuning.gain * (seconds / passes - before)

    def _seconds_per_pass(self, num_requests: int) -> float:
        if not self._pass_seconds:
            return 0.0
        size = num_requests.bit_length()
        nearest = min(self._pass_seconds, key=lambda known: abs(known - size))
        # A pass of fewer requests than any so far takes less; the next draft will tell how much.
        return self._pass_seconds[nearest] * min(1.0, 2.0 ** (size - nearest))

    # ---- results --------------------------------------------------------------------------------------------------

    def observe(self, result: StepResult, seconds: float, waited: bool = False, typical: bool = True) -> float:
        plan, proposal = result.plan, self._proposal
        if proposal is None or not plan.chunks or plan.chunks[0] is not proposal.first_chunk:
            proposal = None
        for chunk in plan.chunks:
            if chunk.drafts:
                self._learn(chunk, result.accepted.get(chunk.request.id, 0), proposal)
        proposing = 0.0 if proposal is None else proposal.seconds
        extra = proposal is not None and proposal.did_extra_work
        typical = typical and (proposal is None or proposal.was_prepared)
        if typical and all(chunk.decodes for chunk in plan.chunks):
            accepted, drafted = sum(result.accepted.values()), waited or proposal is not None
            if extra:
                self.payoff.observe_preparation(len(plan.chunks), accepted, seconds)
            else:
                self.payoff.observe(
                    len(plan.chunks), drafted, accepted, seconds, proposing=proposing, num_drafts=plan.num_drafts
                )
        return seconds - proposing

    def _learn(self, chunk: Chunk, accepted: int, proposal: _Proposal | None) -> None:
        request, proposed = chunk.request, len(chunk.drafts)
        if proposal is not None:
            levels = proposal.levels[request.id][:proposed]
            self.calibration[is_greedy(request)].learn(levels, accepted)
        self.proposer.observe(request, proposed, accepted)

    def forget(self, request_id: str) -> None:
        self.proposer.forget(request_id)


def _may_have_drafts(chunk: Chunk, plan: PlanBuilder) -> bool:
    """Only requests whose blocks are final: a proposer may read and write them before the copies of the step are made.
    No beams: the search chooses their next tokens, not the sampler. Drafts follow the last known token, and a preempted
    request may recompute its output token by token."""
    request = chunk.request
    if not (chunk.decodes and chunk.samples) or chunk.copies or request.group is not None:
        return False
    return not any(swap.request is request for swap in plan.swap_ins)


class Calibration:
    """By level of confidence, how often a draft token is right if those before it are."""

    def __init__(self, tuning: SpeculationTuning) -> None:
        self._weight = tuning.level_prior_weight
        self._judged = [0] * LEVELS  # draft tokens of each level; those behind a wrong one are not judged
        self._right = [0] * LEVELS

    @property
    def chances(self) -> list[float]:
        return [
            (right + self._weight * (level + 0.5) / LEVELS) / (judged + self._weight)
            for level, (right, judged) in enumerate(zip(self._right, self._judged, strict=True))
        ]

    def learn(self, levels: Sequence[int], accepted: int) -> None:
        """The first `accepted` draft tokens of these levels were right, and the next one, if any, was wrong."""
        for place, level in enumerate(levels[: accepted + 1]):
            self._judged[level] += 1
            self._right[level] += place < accepted

"""Who computes which tokens next.

There are no prefill and decode phases here. Every step, each request on board is offered as many of its missing
tokens as the budget and the memory allow: first those that are one token behind, then the others, then requests
from the queue while there are seats. All of it goes through the model as one ragged batch.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from enum import StrEnum

from chairlift.core.budget import Load, StepLimits, TokenBudget
from chairlift.core.draft import PlanDraft
from chairlift.core.events import (
    BudgetDecided,
    Event,
    RequestBoarded,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    TokenProduced,
)
from chairlift.core.kv_cache import KVCache
from chairlift.core.plan import BAD_LOGITS, BlockCopy, StepPlan, StepResult
from chairlift.core.policy import Policy
from chairlift.core.prefix import PrefixMatch
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.errors import InvalidParameter

EndingCheck = Callable[[Request, int], Ending | None]
"""Looks at a token just appended to a request and returns the ending that its text or grammar calls for, if any."""

NO_TOKEN = "no token could be chosen: the model's scores are not finite, or the grammar allows none"


class WaitReason(StrEnum):
    NEXT_STEP = "it has just arrived"
    SEATS = "all seats are taken (max_batch_requests)"
    TARGET = "with one more on board, the others' tokens would come later than target_tpot_ms"
    BUDGET = "the step's token budget is used up (max_batch_tokens, max_prefill_tokens)"
    MEMORY = "not enough free KV blocks for its tokens"
    PREEMPTION = "memory ran out in this step; nobody boards until those on board fit"
    SIBLING = "its sibling (n > 1) is still computing the prompt they share"
    PREFIX = "a request on board is computing the prefix they share"
    GRAMMAR = "the grammar of its structured output is being compiled"


class Scheduler:
    """Owns every request from submission to its one ending. `now` is always an argument: no clock is read here."""

    def __init__(self, kv: KVCache, budget: TokenBudget, policy: Policy, max_batch_requests: int) -> None:
        if max_batch_requests < 1:
            raise InvalidParameter("max_batch_requests", f"must be at least 1, got {max_batch_requests}")
        self.kv = kv
        self.budget = budget
        self.policy = policy
        self.max_batch_requests = max_batch_requests
        self.waiting: list[Request] = []  # both lists are in order of submission
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # ids only: finished requests need not live on in here
        self._events: list[Event] = []
        self._num_submitted = 0
        self._num_steps = 0
        self._queue_waits_for = WaitReason.NEXT_STEP
        self.limits: StepLimits | None = None  # of the step planned last

    # ---- requests in and out ------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        self.check_fits(request.num_prompt, request.max_new_tokens)
        if request.id in self._requests:
            raise InvalidParameter("request_id", f"{request.id!r} is already in use")
        request.order = self._num_submitted
        self._num_submitted += 1
        self._requests[request.id] = request
        self.waiting.append(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.order, request.id))
        self._events.append(RequestQueued(now, request.id, request.num_prompt))

    def check_fits(self, num_prompt: int, max_new_tokens: int) -> None:
        """Refuse what could never run: alone on the lift, a request must be able to reach its last token."""
        # The last token is sampled but never computed, so it needs no room.
        needed = self.kv.blocks_for(num_prompt + max_new_tokens - 1)
        if needed > self.kv.num_blocks:
            needs = f"{num_prompt} tokens and up to {max_new_tokens} new ones"
            problem = f"{needs} exceed the KV cache of {self.capacity} tokens"
            raise InvalidParameter("prompt", f"{problem}; shorten it, lower max_tokens or raise kv_memory")

    @property
    def capacity(self) -> int:
        """How many tokens the whole KV cache holds."""
        return self.kv.num_blocks * self.kv.block_size

    def finish(self, request_id: str, ending: Ending, now: float) -> bool:
        """End a request from outside (cancel, deadline, error). False if it is unknown or over already."""
        request = self._requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return False
        self._finish(request, ending, now)
        return True

    def make_ready(self, request_id: str) -> None:
        """The grammar of a waiting request is compiled: it may board."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ready = True

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def open_requests(self) -> list[str]:
        return [request.id for request in (*self.running, *self.waiting)]

    def why_waiting(self, request_id: str) -> WaitReason | None:
        """Why this request has no seat; None if it has one, or is not here."""
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.WAITING:
            return None
        if not request.ready:
            return WaitReason.GRAMMAR
        if self._waits_for_sibling(request):
            return WaitReason.SIBLING
        return WaitReason.PREFIX if self.kv.match(request).coming else self._queue_waits_for

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ---- planning a step ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        self._expire(now)
        draft = PlanDraft(self._decide_limits(now))
        self._continue_running(draft, now)
        self._board_waiting(draft, now)
        plan = StepPlan(self._num_steps, tuple(draft.chunks.values()))
        self._num_steps += 1
        for chunk in plan.chunks:
            request = chunk.request
            request.steps_in_flight += 1
            request.num_planned = chunk.end
            request.num_unread += chunk.samples
        return plan

    def _decide_limits(self, now: float) -> StepLimits:
        limits = self.budget.limits(Load(self.running, self.waiting, now))
        if limits != self.limits:
            self._events.append(BudgetDecided(now, limits))
        self.limits = limits
        return limits

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.order == order:  # else it is over, and the id perhaps used again
                self.finish(request_id, Ending(FinishReason.DEADLINE), now)

    def _continue_running(self, draft: PlanDraft, now: float) -> None:
        decoding = [request for request in self.running if request.decoding]
        prefilling = [request for request in self.running if not request.decoding]
        for request in decoding + prefilling:
            count = draft.room_for(request)
            # An older request may have preempted this one meanwhile.
            if count and request.status is Status.RUNNING:
                copies = self._reserve_or_preempt(request, count, draft, now)
                if copies is not None:
                    draft.add(request, count, self.kv, copies)

    def _reserve_or_preempt(
        self, request: Request, count: int, draft: PlanDraft, now: float
    ) -> tuple[BlockCopy, ...] | None:
        """Room for `count` tokens, taken from others if need be; None if `request` itself had to give way."""
        while (copies := self.kv.reserve(request, count)) is None:
            victim = self.policy.victim(self.running)
            draft.drop(victim)
            self._preempt(victim, now)
            if victim is request:
                return None
        return copies

    def _preempt(self, victim: Request, now: float) -> None:
        """Take a request's blocks and seat. Its tokens stay known, and are computed again when it is back on board
        (often found in the prefix cache by then)."""
        self._events.append(RequestPreempted(now, victim.id, victim.num_computed))
        self.kv.release(victim)
        self.running.remove(victim)
        victim.start_from(0)
        victim.generation += 1
        victim.status = Status.WAITING
        insort(self.waiting, victim, key=_order)

    def _board_waiting(self, draft: PlanDraft, now: float) -> None:
        if draft.memory_was_short:
            self._queue_waits_for = WaitReason.PREEMPTION
            return
        self._queue_waits_for = WaitReason.NEXT_STEP
        draft.promised_blocks = sum(self._blocks_to_come(request) for request in self.running)
        for request in list(self.policy.boarding_order(self.waiting)):
            obstacle = self._board(request, draft, now)
            if obstacle in (WaitReason.GRAMMAR, WaitReason.SIBLING, WaitReason.PREFIX):
                continue  # it does not wait for room: those behind it may pass
            if obstacle is not None:
                self._queue_waits_for = obstacle
                return

    def _board(self, request: Request, draft: PlanDraft, now: float) -> WaitReason | None:
        """Give `request` a seat and its first tokens, or say what stands in the way (and change nothing)."""
        if not request.ready:
            return WaitReason.GRAMMAR
        if len(self.running) >= self.max_batch_requests:
            return WaitReason.SEATS
        if len(self.running) >= draft.seats:
            return WaitReason.TARGET
        if not draft.prefill_room:
            return WaitReason.BUDGET
        if self._waits_for_sibling(request):
            return WaitReason.SIBLING
        match = self.kv.match(request)
        if match.coming and self._sibling_to_fork(request) is None:
            return WaitReason.PREFIX
        self._begin_table(request, match)
        count = draft.room_for(request)
        copies = self.kv.reserve(request, count) if self._fits_whole(request, draft) else None
        if copies is None:
            self.kv.release(request)
            request.start_from(0)
            return WaitReason.MEMORY
        self._seat(request, match, now)
        draft.add(request, count, self.kv, copies)
        draft.promised_blocks += self._blocks_to_come(request)
        return None

    def _begin_table(self, request: Request, match: PrefixMatch) -> None:
        """Start from blocks that exist already: a sibling's prompt (n > 1), or a prefix in the cache."""
        sibling = self._sibling_to_fork(request)
        if sibling is not None:
            self.kv.fork(sibling, request, num_tokens=request.num_prompt - 1)
        else:
            self.kv.attach(request, match)

    def _siblings_on_board(self, request: Request) -> list[Request]:
        """Other completions of the same prompt, as long as `request` has nothing but that prompt itself."""
        leader = request.leader
        if leader is None or request.num_output:
            return []
        return [other for other in self.running if other is leader or other.leader is leader]

    def _sibling_to_fork(self, request: Request) -> Request | None:
        """One whose blocks of the whole prompt are there to share, the partly filled last one included."""
        siblings = self._siblings_on_board(request)
        return next((other for other in siblings if other.num_computed >= other.num_prompt), None)

    def _waits_for_sibling(self, request: Request) -> bool:
        """A sibling boards once another has computed the prompt, so that they hold the prompt's blocks once."""
        leader = request.leader
        if leader is None or request.num_output or self._sibling_to_fork(request) is not None:
            return False
        return leader.status is Status.WAITING or bool(self._siblings_on_board(request))

    def _seat(self, request: Request, match: PrefixMatch, now: float) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        request.status = Status.RUNNING
        self._events.append(RequestBoarded(now, request.id, request.num_computed, match.miss))

    def _fits_whole(self, request: Request, draft: PlanDraft) -> bool:
        """Whether all known tokens of `request` fit beside what those on board still need: boarding someone only to
        throw him out again is work done twice."""
        return self.kv.num_missing(request) + draft.promised_blocks <= self.kv.num_free

    def _blocks_to_come(self, request: Request) -> int:
        """Blocks that one on board still needs for the tokens it knows, and a spare one for those to come."""
        return self.kv.num_missing(request) + 1

    # ---- applying its result ------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float, ends: EndingCheck | None = None) -> None:
        """Take in what a step computed: advance, append the sampled tokens, index full blocks, finish, free."""
        samples = iter(zip(result.tokens, result.logprobs, strict=True))
        for chunk in result.plan.chunks:
            request = chunk.request
            sample = next(samples) if chunk.samples else None
            request.steps_in_flight -= 1
            if request.status is Status.FINISHED:  # ended while the step was under way: its blocks are free now
                self._leave(request)
                continue
            if chunk.generation != request.generation:  # preempted meanwhile: it computes those tokens again
                continue
            request.num_computed = chunk.end
            self.kv.commit(request)
            if sample is None:
                continue
            request.num_unread -= 1
            token, logprobs = sample
            if token == BAD_LOGITS:
                self._finish(request, Ending(FinishReason.ERROR, NO_TOKEN), now)
                continue
            request.append(token)
            self._events.append(TokenProduced(now, request.id, token, logprobs))
            ending = (ends(request, token) if ends else None) or request.ending_after(token)
            if ending is not None:
                self._finish(request, ending, now)

    def abandon(self, plan: StepPlan, now: float) -> None:
        """A planned step will have no result: set its requests back, since what it wrote and copied is not known."""
        for chunk in plan.chunks:
            request = chunk.request
            if request.steps_in_flight == 0:  # applied already
                continue
            request.steps_in_flight -= 1
            if request.status is Status.FINISHED:
                self._leave(request)
            elif request.status is Status.RUNNING:
                self._preempt(request, now)

    def _finish(self, request: Request, ending: Ending, now: float) -> None:
        """The one place where a request ends."""
        assert request.ending is None
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.ending = ending
        request.status = Status.FINISHED
        self._events.append(RequestFinished(now, request.id, ending))
        # A step under way may still write to its blocks: then apply() lets it leave.
        if request.steps_in_flight == 0:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.steps_in_flight == 0:
            self.kv.release(request)
            del self._requests[request.id]


def _order(request: Request) -> int:
    return request.order

"""Who computes which tokens next.

There are no prefill and decode phases here. Every step, each request on board is offered as many of its missing
tokens as the budget and the memory allow: first those that are one token behind, then the others, then requests
from the queue while there are seats. All of it goes through the model as one ragged batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.core.beam.group import BeamGroup
from chairlift.core.budgets.base import BatchLoad, TokenBudget
from chairlift.core.events import BudgetDecided, DraftsVerified, Event, RequestFinished, RequestQueued, TokenProduced
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.orderings.base import Ordering
from chairlift.core.orderings.fcfs import FcfsOrdering
from chairlift.core.plan import BAD_LOGITS, Chunk, StepPlan, StepResult
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.policies.base import Policy
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.scheduler import packing
from chairlift.core.scheduler.admission import admit_waiting
from chairlift.core.scheduler.deadlines import Deadlines, Forecast
from chairlift.core.scheduler.siblings import waits_for_sibling
from chairlift.core.scheduler.state import SchedulerState
from chairlift.core.scheduler.tenant_isolation import TenantIsolation
from chairlift.core.scheduler.waiting_queue import MAX_OVERTAKES, WaitingQueue, WaitReason
from chairlift.core.speculation import Speculation
from chairlift.core.step_limits import StepLimits
from chairlift.errors import InvalidParameter

EndingCheck = Callable[[Request, int], Ending | None]
"""Looks at a token just appended to a request and returns the ending that its text or grammar calls for, if any. Also
asked with BAD_LOGITS, of which nothing was appended: the grammar may know why no token could be chosen."""

HOPELESS = "by the measured speed it could not have been finished in time"
NO_TOKEN = "no token could be chosen: the model's scores are not finite, or the grammar allows none"


class Scheduler:
    """Owns every request from submission to its one ending. `now` is always an argument: no clock is read here."""

    def __init__(
        self,
        kv: KVCache,
        budget: TokenBudget,
        policy: Policy,
        max_batch_requests: int,
        *,
        ordering: Ordering | None = None,
        max_overtakes: int = MAX_OVERTAKES,
        swap: SwapSpace | None = None,
        forecast: Forecast | None = None,
        speculation: Speculation | None = None,
        tenant_isolation: TenantIsolation | None = None,
    ) -> None:
        self.kv = kv
        self.budget = budget
        self.policy = policy
        self.ordering = ordering or FcfsOrdering()
        self.forecast = forecast
        self.swap = swap or SwapSpace()
        self.speculation = speculation
        self.tenant_isolation = tenant_isolation
        self.state = SchedulerState(kv, self.ordering, max_batch_requests, max_overtakes, self.swap)
        self._requests = self.state.requests
        self._deadlines = Deadlines(self._requests.get)
        self._num_submitted = 0
        self._num_steps = 0
        self.limits: StepLimits | None = None  # of the step planned last

    @property
    def waiting(self) -> WaitingQueue:
        return self.state.waiting

    @property
    def running(self) -> list[Request]:
        return self.state.running

    @property
    def idle(self) -> list[Request]:
        return self.state.idle

    @property
    def max_batch_requests(self) -> int:
        return self.state.max_batch_requests

    # ---- requests in and out ------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        self.check_fits(request.num_prompt, request.max_new_tokens, request.num_slots)
        for one in request.companions:
            if one.id in self._requests:
                raise InvalidParameter("request_id", f"{one.id!r} is already in use")
        for one in request.companions:
            if one.order < 0:
                one.order = self.take_number()
            self._requests[one.id] = one
        self.waiting.add(request)
        self.ordering.arrived(request)
        self._deadlines.add(request)
        self.state.events.append(RequestQueued(now, request.id, request.num_prompt))

    def take_number(self) -> int:
        """The next place in the order of submission. A request that has one keeps it when it is submitted: a simulation
        shows the scheduler only those about whom there is something to decide, sometimes long after they came."""
        self._num_submitted += 1
        return self._num_submitted - 1

    def submit_beams(self, requests: Sequence[Request], now: float) -> None:
        """One beam search, as wide as there are requests. In the end, the first of them is the best, and so on."""
        self.submit(BeamGroup(requests).leader, now)

    def expect_no_more(self) -> None:
        """What waits now has all the company it will get: a batch need not be full to be released."""
        self.waiting.expect_no_more()

    def check_fits(self, num_prompt: int, max_new_tokens: int, beams: int = 1) -> None:
        """Refuse what could never run: alone on the batch, a request must be able to reach its last token."""
        if beams == 1 and num_prompt + max_new_tokens <= self.capacity:  # by far the most
            return
        if beams > self.max_batch_requests:
            problem = f"{beams} beams need a seat each, but there are {self.max_batch_requests}"
            raise InvalidParameter("beam_width", f"{problem} (max_batch_requests)")
        room = self.most_new_tokens(num_prompt)
        if max_new_tokens <= room and max_new_tokens > self.most_new_tokens(num_prompt, beams):
            needs = f"{beams} beams of up to {max_new_tokens} new tokens"
            problem = f"{needs} exceed the KV cache of {self.capacity} tokens"
            raise InvalidParameter("beam_width", f"{problem}; lower it or max_tokens, or raise kv_memory")
        if max_new_tokens > room:
            needs = f"{num_prompt} tokens and up to {max_new_tokens} new ones"
            problem = f"{needs} exceed the KV cache of {self.capacity} tokens"
            raise InvalidParameter("prompt", f"{problem}; shorten it, lower max_tokens or raise kv_memory")

    def most_new_tokens(self, num_prompt: int, beams: int = 1) -> int:
        """How many tokens there is room for after a prompt of this length if beams share nothing but the prompt."""
        shared = num_prompt // self.kv.block_size
        blocks_each = max(0, self.kv.num_blocks - shared) // beams
        # The last token is sampled but never computed, so it needs no room.
        return min(shared + blocks_each, self.kv.num_blocks) * self.kv.block_size + 1 - num_prompt

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

    def switch_policy(self, policy: Policy) -> None:
        """From the next step on, boarding goes by `policy`. Those on board stay; the seats that finished requests kept
        under the old one are free, unless the new one keeps them too."""
        self.policy = policy
        if not policy.keeps_slots:
            self.state.free_idle_slots()

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_events(self) -> bool:
        return bool(self.state.events)

    def open_requests(self) -> list[str]:
        return [request.id for request in (*self.running, *self.waiting)]

    def why_waiting(self, request_id: str) -> WaitReason | None:
        """Why this request has no seat; None if it has one, or is not here."""
        request = self._requests.get(request_id)
        if request is not None and request.group is not None:
            request = request.group.leader
        if request is None or request.status is not Status.WAITING:
            return None
        if not request.ready:
            return WaitReason.GRAMMAR
        if self.swap.holds(request):
            return self.waiting.reason(request)
        if waits_for_sibling(request, self.running):
            return WaitReason.SIBLING
        return WaitReason.PREFIX if self.kv.match(request).coming else self.waiting.reason(request)

    def next_wakeup(self, now: float) -> float | None:
        """When `schedule` has something to do if nothing else happens: at once, later, or (None) never."""
        if not self.has_work:
            return None
        opens_at = None if self.running else self.policy.opens_at(self.waiting, self.max_batch_requests)
        if opens_at is None:
            return now
        deadline = self._deadlines.next()
        return max(now, opens_at if deadline is None else min(opens_at, deadline))

    def drain_events(self) -> list[Event]:
        events, self.state.events = self.state.events, []
        return events

    # ---- planning a step ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        self.swap.begin_step()
        self._drop_late(now)
        draft = PlanBuilder(self._decide_limits(now), taken=self.state.aside)
        if self.tenant_isolation is not None:
            self.tenant_isolation.hold_back(self.state, draft, now)
        packing.decode(self.state, draft, now)
        packing.advance_prompts(self.state, draft, now)
        admit_waiting(self.state, self.policy, draft, now)
        packing.share_rest_among_prompts(self.state, draft)
        if not draft.chunks:
            packing.keep_moving(self.state, draft, now)
        if self.tenant_isolation is not None:
            self.tenant_isolation.give_way(self.state, draft, now)
        if self.speculation is not None:
            try:
                self.speculation.add_drafts(self.state, draft)
            except BaseException:  # also Ctrl-C while a network guesses: copies that were planned will not be made
                self.abandon(self._seal(draft), now)
                raise
        return self._seal(draft)

    def _seal(self, draft: PlanBuilder) -> StepPlan:
        """Nothing is added to the step any more: its requests count as planned so far."""
        chunks = tuple(draft.chunks.values())
        if not chunks:  # then nothing is run, and nothing copied
            for swap in draft.swap_outs:
                self.state.forget_swap(swap.request)
            draft.swap_outs.clear()
        for chunk in chunks:
            request = chunk.request
            request.steps_in_flight += 1
            request.num_planned = chunk.start + chunk.count
            request.num_unread += chunk.samples
        self._num_steps += 1
        swaps = tuple(draft.swap_outs), tuple(draft.swap_ins)
        return StepPlan(self._num_steps - 1, chunks, len(self.idle), *swaps)

    def _drop_late(self, now: float) -> None:
        for request in self._deadlines.passed(now):
            self._finish(request, Ending(FinishReason.DEADLINE), now)
        if self.forecast is not None:
            for request in self._deadlines.hopeless(now, self.forecast, self.kv):
                self._finish(request, Ending(FinishReason.DEADLINE, HOPELESS), now)

    def _decide_limits(self, now: float) -> StepLimits:
        limits = self.budget.limits(BatchLoad(self.running, self.waiting, now))
        if limits != self.limits:
            self.state.events.append(BudgetDecided(now, limits))
        self.limits = limits
        return limits

    # ---- applying its result ------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float, ends: EndingCheck | None = None) -> None:
        """Take in what a step computed: advance, append the sampled tokens, index full blocks, finish, free."""
        assert len(result.tokens) == len(result.logprobs)
        num_read = 0  # of the sampled tokens
        for chunk in result.plan.chunks:
            request = chunk.request
            accepted = result.accepted.get(request.id, 0) if chunk.drafts else 0
            sampled = range(num_read, num_read + chunk.samples + accepted)
            num_read = sampled.stop
            request.steps_in_flight -= 1
            if request.ending is not None:  # it came while the step was under way: its blocks are free now
                self.state.let_go(request)
                continue
            if chunk.generation != request.generation:  # preempted meanwhile: it computes those tokens again
                continue
            request.num_computed = chunk.known_end
            self.kv.commit(request)
            request.num_unread -= chunk.samples
            if chunk.drafts:
                self._note_drafts(chunk, accepted, now)
            if request.group is not None and sampled:
                self._advance_beam(request, result, result.tokens[sampled.start], now, ends)
            else:
                self._append(request, result, sampled, now, ends)
            if chunk.drafts and request.status is Status.RUNNING:
                request.rewind()
                self.kv.trim(request, request.num_computed)

    def _append(
        self, request: Request, result: StepResult, sampled: range, now: float, ends: EndingCheck | None
    ) -> None:
        """Each sampled token but the last was drafted, and so is computed already: with it, the next one counts."""
        for index in sampled:
            if index > sampled.start:
                request.num_computed += 1
                self.kv.commit(request)
            token = result.tokens[index]
            if token == BAD_LOGITS:
                known = ends(request, token) if ends else None
                self._finish(request, known or Ending(FinishReason.ERROR, NO_TOKEN), now)
                return
            request.append(token)
            self.ordering.appended(request)
            self.state.events.append(TokenProduced(now, request.id, token, result.logprobs[index]))
            ending = (ends(request, token) if ends else None) or request.ending_after(token)
            if ending is not None:
                self._finish(request, ending, now)
                return

    def _advance_beam(
        self, request: Request, result: StepResult, token: int, now: float, ends: EndingCheck | None
    ) -> None:
        """Which token comes next is the search's to say, once all of its beams have come so far."""
        assert request.group is not None
        if token == BAD_LOGITS:
            self._finish(request, Ending(FinishReason.ERROR, NO_TOKEN), now)
            return
        request.group.take(request, result.candidates[request.id], self.state, now)
        if request.group.search.over:
            request.group.tell(self.state, now, ends)
            self._leave(request.companions)

    def _note_drafts(self, chunk: Chunk, accepted: int, now: float) -> None:
        self.state.events.append(DraftsVerified(now, chunk.request.id, len(chunk.drafts), accepted))

    def abandon(self, plan: StepPlan, now: float) -> None:
        """A planned step will have no result: set its requests back, since what it wrote and copied is not known."""
        for swap in plan.swap_outs:
            if swap.request.status is Status.WAITING:
                self.state.forget_swap(swap.request)
        for chunk in plan.chunks:
            request = chunk.request
            if request.steps_in_flight == 0:  # applied already
                continue
            request.steps_in_flight -= 1
            if request.status is Status.FINISHED:
                self.state.let_go(request)
            elif request.status is Status.RUNNING:
                self.state.preempt(request, now)

    def _finish(self, request: Request, ending: Ending, now: float) -> None:
        """End a request, and if it is a beam, its whole search."""
        for one in request.companions:
            assert one.ending is None
            one.ending = ending
            self.state.events.append(RequestFinished(now, one.id, ending))
        self._leave(request.companions)

    def _leave(self, requests: Sequence[Request]) -> None:
        """The one way off the batch, or out of the queue, for good."""
        first = requests[0]
        for request in requests:
            was_on_board = request.status is Status.RUNNING
            if was_on_board:
                self.running.remove(request)
            elif request is first:  # the others of a beam search are in no queue
                self.waiting.remove(request)
            request.status = Status.FINISHED
            if self.speculation is not None:
                self.speculation.forget(request.id)
            if was_on_board and self.policy.keeps_slots:
                self.idle.append(request)
            else:
                self.state.let_go(request)
        self.ordering.finished(first)
        self.state.end_batch_if_over()

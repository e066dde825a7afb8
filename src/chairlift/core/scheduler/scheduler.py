"""Decides which request computes which tokens in the next step.

There are no prefill and decode phases. In every step, each running request computes as many of its missing tokens as
the budget and the memory allow: first the requests that are one token behind, then the others, then requests from the
queue while there are free slots. The model computes all of them as one ragged batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from chairlift.core.adapters import Adapter, AdapterPool
from chairlift.core.beam import BeamGroup
from chairlift.core.budgets.base import BatchLoad, TokenBudget
from chairlift.core.cost_model import WorkForecast
from chairlift.core.encoder_cache import EncoderCache
from chairlift.core.events import BudgetDecided, Event, RequestQueued
from chairlift.core.executor import Speculation
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.lengths import OutputLengths
from chairlift.core.orderings.base import FcfsOrdering, Ordering, Outlook
from chairlift.core.plan import PlanBuilder, StepLimits, StepPlan, StepResult
from chairlift.core.policies.base import Policy
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.scheduler import packing
from chairlift.core.scheduler.admission import admit_waiting, waits_for_sibling
from chairlift.core.scheduler.deadlines import Deadlines
from chairlift.core.scheduler.encoding import plan_encoding
from chairlift.core.scheduler.results import EndingCheck, ResultApplier
from chairlift.core.scheduler.state import SchedulerState
from chairlift.core.scheduler.tenant_isolation import TenantIsolation
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason
from chairlift.errors import InvalidParameter

CANNOT_MEET_DEADLINE = "at the measured speed it could not be finished in time"


class Scheduler:
    """Owns every request from submission to its end. The time `now` is always an argument; no clock is read here."""

    state_type: ClassVar[type[SchedulerState]] = SchedulerState

    def __init__(
        self,
        kv: KVCache,
        budget: TokenBudget,
        policy: Policy,
        max_batch_requests: int,
        *,
        ordering: Ordering | None = None,
        max_overtakes: int | None = None,
        swap: SwapSpace | None = None,
        forecast: WorkForecast | None = None,
        speculation: Speculation | None = None,
        tenant_isolation: TenantIsolation | None = None,
        lengths: OutputLengths | None = None,
        adapters: AdapterPool | None = None,
        images: EncoderCache | None = None,
    ) -> None:
        self.kv = kv
        self.budget = budget
        self.ordering = ordering or FcfsOrdering()
        self.forecast = forecast
        self.swap = swap or SwapSpace()
        self.speculation = speculation
        self.tenant_isolation = tenant_isolation
        max_overtakes = self.ordering.max_overtakes if max_overtakes is None else max_overtakes
        self.adapters = adapters or AdapterPool()
        self.state = self.state_type(
            kv, policy, self.ordering, max_batch_requests, max_overtakes, self.swap, lengths, adapters=self.adapters
        )
        self.state.images = images
        if lengths is not None:
            self.ordering.use_lengths(lengths.remaining)
        self.ordering.use_cache(kv.tokens_at_hand)
        self._results = ResultApplier(self.state, speculation)
        self._requests = self.state.requests
        self._deadlines = Deadlines(self._requests.get)
        self._num_submitted = 0
        self._num_steps = 0
        self.limits: StepLimits | None = None  # The limits of the step planned last.

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def waiting(self) -> WaitingQueue:
        return self.state.waiting

    @property
    def running(self) -> list[Request]:
        return self.state.running

    @property
    def images(self) -> EncoderCache | None:
        """What is encoded of images; None if the model reads none."""
        return self.state.images

    @property
    def idle(self) -> list[Request]:
        return self.state.idle

    @property
    def max_batch_requests(self) -> int:
        return self.state.max_batch_requests

    # ---- requests in and out ------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        self.check_fits(request.num_prompt, request.max_new_tokens, request.num_slots)
        for member in request.companions:
            if member.id in self._requests:
                raise InvalidParameter("request_id", f"{member.id!r} is already in use")
        for member in request.companions:
            if member.order < 0:
                member.order = self.take_place()
            self._requests[member.id] = member
            if self.images is not None and member.images:
                self.images.open[member.id] = member
        self.waiting.add(request)
        self.ordering.arrived(request)
        self._deadlines.add(request)
        self.state.events.append(RequestQueued(now, request.id, request.num_prompt))

    def take_place(self) -> int:
        """Reserve the next position in the order of submission, the `order` of a request."""
        self._num_submitted += 1
        return self._num_submitted - 1

    def submit_beams(self, requests: Sequence[Request], now: float) -> None:
        """Submit a beam search with one request per beam; they finish with the hypotheses, best first."""
        self.submit(BeamGroup(requests).leader, now)

    def expect_no_more(self) -> None:
        """Release batches that are not full, because no more requests will be submitted soon."""
        self.waiting.expect_no_more()

    def check_fits(self, num_prompt: int, max_new_tokens: int, beams: int = 1) -> None:
        """Raise InvalidParameter for a request that could not reach its last token even alone in the batch."""
        max_new_tokens = max(1, max_new_tokens)  # the last token of a prompt is always computed
        if beams == 1 and num_prompt + max_new_tokens <= self.capacity:  # the usual case
            return
        if beams > self.max_batch_requests:
            problem = f"{beams} beams need a slot each, but there are {self.max_batch_requests}"
            raise InvalidParameter("beam_width", f"{problem} (max_batch_requests)")
        if beams > 1 and self.kv.states is not None and beams > self.kv.states.max_beams:
            most = self.kv.states.max_beams
            problem = f"{beams} beams need two state slots each, and there are slots for {most} beams"
            raise InvalidParameter("beam_width", f"{problem}; lower it or raise kv_memory")
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
        """The tokens that fit after a prompt of this length if beams share only the prompt."""
        shared = num_prompt // self.kv.block_size
        # The last token is sampled but never computed, so it needs no block.
        return (shared + self.kv.room_behind(shared, beams)) * self.kv.block_size + 1 - num_prompt

    @property
    def capacity(self) -> int:
        """The longest sequence that the KV cache has room for, in tokens."""
        return self.kv.room_behind(0) * self.kv.block_size

    def finish(self, request_id: str, ending: Ending, now: float) -> bool:
        """End a request (cancel, deadline, error); return False if it is unknown or has ended already."""
        request = self._requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return False
        self._results.finish(request, ending, now)
        return True

    def finish_users(self, adapter: Adapter, ending: Ending, now: float) -> None:
        """End the requests that wait for an adapter which could not be loaded."""
        for request in list(self.waiting):
            if any(use.adapter is adapter for use in request.adapters):
                self._results.finish(request, ending, now)

    def make_ready(self, request_id: str) -> None:
        """Allow the admission of a request whose grammar is compiled."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ready = True

    def switch_policy(self, policy: Policy) -> None:
        """Use `policy` from the next step on. Running requests stay; slots of finished requests become free unless the
        new policy keeps them too."""
        self.state.policy = policy
        if not policy.keeps_slots:
            self.state.free_idle_slots()

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def has_work(self) -> bool:
        left_over = self.images is not None and self.images.is_left_over
        return bool(self.waiting or self.running or self.kv.loads or left_over)

    @property
    def has_events(self) -> bool:
        return bool(self.state.events)

    def open_requests(self) -> list[str]:
        return [request.id for request in (*self.running, *self.waiting)]

    def why_waiting(self, request_id: str) -> WaitReason | None:
        """Why a request waits; None if it is running or unknown."""
        request = self._requests.get(request_id)
        if request is not None and request.group is not None:
            request = request.group.leader
        if request is None or request.status is not Status.WAITING:
            return None
        if not request.ready:
            return WaitReason.GRAMMAR
        if self.swap.holds(request):
            return self.waiting.reason(request)
        if self.kv.loads is not None and self.kv.loads.is_loading(request):
            return WaitReason.LOADING
        if waits_for_sibling(request, self.running):
            return WaitReason.SIBLING
        return WaitReason.PREFIX if self.kv.match(request).in_progress else self.waiting.reason(request)

    def wait_for_loads(self, seconds: float) -> None:
        """Wait for a load from a tier to end, if any is in flight, at most for so long."""
        if self.kv.tiers is not None and self.kv.loads:
            self.kv.tiers.mover.wait(seconds)

    def close_tiers(self) -> None:
        """Write what the tiers are still to keep, and stop their threads."""
        if self.kv.tiers is not None:
            self.kv.tiers.mover.close()

    def next_wakeup(self, now: float) -> float | None:
        """When to call `schedule` next if nothing else happens; None if there is no work."""
        if not self.has_work:
            return None
        opens_at = (
            None if self.running or not self.waiting else self.policy.opens_at(self.waiting, self.max_batch_requests)
        )
        if opens_at is None:
            return now
        deadline = self._deadlines.next()
        return max(now, opens_at if deadline is None else min(opens_at, deadline))

    def drain_events(self) -> list[Event]:
        events, self.state.events = self.state.events, []
        return events

    # ---- planning a step ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step."""
        self.swap.begin_step()
        if self.kv.loads is not None:
            self.kv.loads.begin_step(now)
        self._drop_late(now)
        builder = self._begin_plan(now)
        packing.plan_decodes(self.state, builder, now)
        plan_encoding(self.state, builder)
        packing.advance_prompts(self.state, builder, now)
        admit_waiting(self.state, builder, now)
        packing.share_rest_among_prompts(self.state, builder)
        packing.ensure_progress(self.state, builder, now)
        self._isolate_tenants(builder, now)
        self._add_drafts(builder, now)
        return self._seal(builder)

    def _drop_late(self, now: float) -> None:
        for request in self._deadlines.expired(now):
            self._results.finish(request, Ending(FinishReason.DEADLINE), now)
        if self.forecast is not None:
            for request in self._deadlines.unmeetable(now, self.forecast, self.kv):
                self._results.finish(request, Ending(FinishReason.DEADLINE, CANNOT_MEET_DEADLINE), now)

    def _begin_plan(self, now: float) -> PlanBuilder:
        chunk = self.limits.prefill_tokens if self.limits else 0
        outlook = Outlook(now, self.running, self.waiting, self.forecast, chunk)
        self.ordering.begin_step(outlook)
        limits = self.budget.limits(BatchLoad(self.running, self.waiting, now))
        if limits != self.limits:
            self.state.events.append(BudgetDecided(now, limits))
        self.limits = limits
        builder = PlanBuilder(limits, self.images)
        if self.tenant_isolation is not None:
            self.tenant_isolation.limit_heavy_tenants(self.state, builder, now)
        return builder

    def _isolate_tenants(self, builder: PlanBuilder, now: float) -> None:
        if self.tenant_isolation is not None:
            self.tenant_isolation.drop_heavy_chunks(self.state, builder, now)

    def _add_drafts(self, builder: PlanBuilder, now: float) -> None:
        if self.speculation is None:
            return
        try:
            self.speculation.add_drafts(self.state, builder)
        except BaseException:  # Ctrl-C may come while a draft model runs: the planned block copies will not be made.
            self.abandon(self._seal(builder), now)
            raise

    def _seal(self, builder: PlanBuilder) -> StepPlan:
        """Finish the plan and count its tokens as planned."""
        chunks = tuple(builder.chunks.values())
        if not chunks:  # an empty plan is not run, so nothing is swapped out
            for swap in builder.swap_outs:
                self.state.forget_swap(swap.request)
            builder.swap_outs.clear()
        for chunk in chunks:
            request = chunk.request
            chunk.beside = self.kv.tables_beside(request)
            request.steps_in_flight += 1
            if request.adapters:
                self.adapters.step_planned(request)
            request.num_planned = chunk.start + chunk.count
            request.num_unread += chunk.samples
            if self.images is not None and request.images:
                self.images.used(request, chunk.start, chunk.end)
        self._num_steps += 1
        reads = builder.reads and any(chunk.read for chunk in chunks)
        swap_outs, swap_ins = tuple(builder.swap_outs), tuple(builder.swap_ins)
        states = () if self.kv.states is None else self.kv.states.plan(chunks)
        idle = len(self.idle) if chunks else 0
        return StepPlan(
            self._num_steps - 1, chunks, idle, swap_outs, swap_ins, reads, states, encoding=builder.encoding
        )

    # ---- applying its result ------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float, ends: EndingCheck | None = None) -> None:
        """Apply the result of a step: append sampled tokens, index full blocks, finish requests and free blocks."""
        self._results.apply(result, now, ends)
        if self.kv.tiers is not None:
            self.kv.tiers.flush()

    def abandon(self, plan: StepPlan, now: float) -> None:
        """Handle a planned step without a result: preempt its requests, since the state of their blocks is unknown."""
        self._results.abandon(plan, now)

"""Admits waiting requests to the batch and records why the others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from chairlift.core.kv.block_pool import Resource
from chairlift.core.plan import NO_LIMIT, PlanBuilder
from chairlift.core.policies.base import PolicyDecision
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.packing import share_rest_among_prompts
from chairlift.core.scheduler.state import SchedulerState
from chairlift.core.scheduler.waiting_queue import WaitReason

MAX_PASSED_OVER = 32  # requests that may fail to fit in one step before admission stops


def admit_waiting(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    """Admit as many waiting requests as policy, slots, budget and memory allow."""
    state.waiting.begin_admission()
    if builder.memory_was_short:
        state.waiting.note_default(WaitReason.PREEMPTION)
        return
    if not state.waiting:
        return
    admission = _StepAdmission(state, builder, now)
    while state.waiting:
        decision = state.policy.decide(state.waiting, state.running, state.max_batch_requests, now)
        if admission.offer_slots(decision):
            return


class _StepAdmission:
    """The admissions of one step."""

    def __init__(self, state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        self.state = state
        self.kv = state.kv
        self.builder = builder
        self.now = now
        self._newly_admitted: set[int] = set()

    @cached_property
    def promised(self) -> dict[Resource, int]:
        """What running requests will still take of each resource; computed on first use, then kept up to date."""
        return {resource: self.state.promised(resource) for resource in self.kv.resources}

    def offer_slots(self, decision: PolicyDecision) -> bool:
        """Try the candidates in order; return False if the order changed: a request became starved, or a starved one no
        longer waits for another request."""
        waiting, passed_over, starved = self.state.waiting, list[Request](), list[Request]()
        if decision.reason_of_others is not None:
            waiting.note_default(decision.reason_of_others)
        elif self._full(self.state.running, 1) and not self.state.ordering.takes_slots:
            waiting.note_default(self._why_full(self.state.running, 1))  # the queue may be long
            return True
        candidates = iter(decision.candidates)
        for request in candidates:
            obstacle = self._admit(request)
            if obstacle is None:
                newly_starved = waiting.count_passing(request, passed_over)
                if newly_starved or not all(map(self._waits_for_another, starved)):
                    return False
                continue
            waiting.note(request, obstacle)
            if obstacle is WaitReason.IMAGES:
                continue  # its images make progress in each step, so it is not passed over
            if obstacle in (WaitReason.SIBLING, WaitReason.PREFIX, WaitReason.LOADING, WaitReason.ADAPTER):
                if request.starved:
                    starved.append(request)
                continue  # it waits for another request, or for a disk, so it is not passed over
            passed_over.append(request)
            reason_of_rest = self._why_stop_after(request, obstacle, len(passed_over))
            if reason_of_rest is None:
                continue
            if decision.reason_of_others is None:
                waiting.note_default(reason_of_rest)
            else:
                for other in candidates:
                    waiting.note(other, reason_of_rest)
            return True
        return True

    def _why_stop_after(self, request: Request, obstacle: WaitReason, num_passed_over: int) -> WaitReason | None:
        """The reason why no request after `request` can be admitted, given its obstacle; None if one might be."""
        # A request that needs several slots may be passed over by one that needs fewer, until it is starved.
        no_slot = obstacle in (WaitReason.SLOTS, WaitReason.TARGET) and request.num_slots == 1
        if no_slot or self.builder.prefill_room <= 0 or num_passed_over >= MAX_PASSED_OVER:
            return obstacle
        return WaitReason.TURN if request.starved else None

    def _waits_for_another(self, request: Request) -> bool:
        if not self.state.adapters.ready(request) or (self.kv.loads is not None and self.kv.loads.is_loading(request)):
            return True
        return waits_for_sibling(request, self.state.running) or self.kv.match(request).in_progress

    def _admit(self, request: Request) -> WaitReason | None:
        """Admit `request` and plan its first tokens, or return the obstacle (and change nothing)."""
        running = self.state.running
        if self.state.ordering.holds_back(request):
            return WaitReason.ISOLATION
        if self._full(running, request.num_slots) and self.state.ordering.slot_to_take(request, running) is None:
            return self._why_full(running, request.num_slots)
        if self.builder.budget_for(request) <= 0:
            return WaitReason.BUDGET
        if not self.state.adapters.ready(request):
            return WaitReason.ADAPTER if self.state.adapters.want(request) else WaitReason.ADAPTER_MEMORY
        swapped = request.num_computed  # computed tokens of a waiting request are in host memory
        loads = self.kv.loads
        if loads is not None and loads.is_loading(request):
            return WaitReason.LOADING
        match = self.kv.match(request)
        sibling = None if swapped else sibling_to_fork(request, running)
        if not swapped and waits_for_sibling(request, running):
            return WaitReason.SIBLING
        if sibling is not None and not self.kv.can_fork(sibling, request.num_prompt - 1):
            sibling = None
        if sibling is not None:
            self.kv.fork(sibling, request, num_tokens=request.num_prompt - 1)
        elif match.in_progress and not swapped:
            return WaitReason.PREFIX
        elif loads is not None and not swapped and loads.start(request, match, *self._spare()):
            return WaitReason.LOADING
        else:
            self.kv.attach(request, match)
        cached = request.num_computed
        request.start_from(max(cached, swapped))
        obstacle = self._plan_first_tokens(request)
        if obstacle is not None:
            self.kv.release(request)
            request.start_from(swapped)
            return obstacle
        if sibling is None:
            self.kv.claim(request)
        self.state.admit(request, cached, match.miss, self.now)
        self._newly_admitted.add(request.order)
        self._promise(request)
        return None

    def _spare(self) -> tuple[int, int]:
        """The blocks and the state slots that running requests will not take."""
        blocks, *slots = (each.num_free - promised for each, promised in self.promised.items())
        return blocks, slots[0] if slots else NO_LIMIT

    def _promise(self, request: Request, sign: int = 1) -> None:
        for resource in self.promised:
            self.promised[resource] += sign * resource.to_come(request)

    def _plan_first_tokens(self, request: Request) -> WaitReason | None:
        promised = dict(self.promised)  # Running prompts take some of it below.
        # Running prompts that are more urgent get their part of the prefill budget first.
        share_rest_among_prompts(self.state, self.builder, before=self.state.urgency(request, self.builder))
        if self.builder.budget_for(request) <= 0:
            return WaitReason.BUDGET
        if self.builder.room_for(request) <= 0:
            return WaitReason.IMAGES
        victims = self._victims_for(request, promised)
        if isinstance(victims, WaitReason):
            return victims
        for victim in victims:
            for other in self.state.running:
                if other in victim.companions:
                    self._promise(other, -1)
            self.state.preempt(victim, self.now, self.builder)
        restored = self.kv.restore(request)
        count = self.builder.room_for(request)
        copies = None if restored is None else self.kv.reserve(request, count)
        if restored is None or copies is None:
            return WaitReason.MEMORY
        self.builder.add(request, count, self.kv.table(request), copies)
        if self.state.swap.holds(request):
            self.builder.swap_ins += self.state.swap.swap_in(request, restored)
        return None

    def _victims_for(self, request: Request, promised: Mapping[Resource, int]) -> list[Request] | WaitReason:
        """The running requests to preempt so that `request` fits, if the ordering allows it; usually none.

        All its known tokens must fit beside what running requests still need, so that it is not preempted soon.
        """
        staying, victims = self.state.running, list[Request]()
        spare = {each: each.num_free - promised[each] - each.need(request) for each in promised}
        if self._will_be_short(request):
            return WaitReason.FUTURE
        while self._full(staying, request.num_slots) or any(left < 0 for left in spare.values()):
            victim = self.state.ordering.slot_to_take(request, staying)
            if victim is None or victim.order in self._newly_admitted:
                no_slot = self._full(staying, request.num_slots)
                return self._why_full(staying, request.num_slots) if no_slot else WaitReason.MEMORY
            together = [other for other in staying if other in victim.companions]
            staying = [other for other in staying if other not in together]
            victims.append(victim)
            for each in spare:
                spare[each] += each.num_own(together) + sum(map(each.to_come, together))
        return victims

    def _will_be_short(self, request: Request) -> bool:
        """Whether memory would run out before those running end, by the lengths learned so far."""
        lengths, running = self.state.lengths, [*self.state.running, request]
        if lengths is None or len(running) == 1:
            return False
        held = sum(len(self.kv.table(each)) for each in running)
        return lengths.most_blocks(running, self.kv.block_size) > self.kv.num_free + held

    def _full(self, running: Sequence[Request], slots: int) -> bool:
        """Whether fewer than `slots` slots are free with these requests running."""
        taken = self.state.slots_with(running)
        # With no other request running, the limit of the budget does not apply: a beam search needs all its slots.
        limit = min(self.state.max_batch_requests, max(self.builder.slots, 0 if taken else slots))
        return taken + slots > limit

    def _why_full(self, running: Sequence[Request], slots: int) -> WaitReason:
        over = self.state.slots_with(running) + slots > self.state.max_batch_requests
        return WaitReason.SLOTS if over else WaitReason.TARGET


# ---- completions of one prompt (n > 1): the first one admitted computes it, the others share its blocks -------------


def sibling_to_fork(request: Request, running: Sequence[Request]) -> Request | None:
    """Find a running sibling whose prompt is computed, so that its prompt blocks can be shared."""
    siblings = _running_siblings(request, running)
    return next((other for other in siblings if other.num_computed >= other.num_prompt), None)


def waits_for_sibling(request: Request, running: Sequence[Request]) -> bool:
    """Whether `request` must wait until a sibling has computed the prompt that they share."""
    leader = request.leader
    if leader is None or request.num_output or sibling_to_fork(request, running) is not None:
        return False
    return leader.status is Status.WAITING or bool(_running_siblings(request, running))


def _running_siblings(request: Request, running: Sequence[Request]) -> list[Request]:
    """Running completions of the same prompt; none once `request` has output."""
    leader = request.leader
    if leader is None or request.num_output:
        return []
    return [other for other in running if other is leader or other.leader is leader]

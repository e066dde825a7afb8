"""From the queue to a seat: who gets on board in this step, and what keeps the others waiting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.policies.base import Policy, PolicyDecision
from chairlift.core.request import Request
from chairlift.core.scheduler.packing import share_rest_among_prompts
from chairlift.core.scheduler.siblings import sibling_to_fork, waits_for_sibling
from chairlift.core.scheduler.state import SchedulerState, slots_of
from chairlift.core.scheduler.waiting_queue import WaitReason

MAX_PASSED_OVER = 32  # how many that do not fit are asked in one step before the rest of the queue is left alone


def admit_waiting(state: SchedulerState, policy: Policy, draft: PlanBuilder, now: float) -> None:
    state.waiting.begin_admission()
    if draft.memory_was_short:
        state.waiting.note_rest(WaitReason.PREEMPTION)
        return
    if not state.waiting:
        return
    boarding = _Boarding(state, draft, now)
    while state.waiting:
        admission = policy.decide(state.waiting, state.running, state.max_batch_requests, now)
        if boarding.offer_seats(admission):
            return


class _Boarding:
    """The boarding of one step."""

    def __init__(self, state: SchedulerState, draft: PlanBuilder, now: float) -> None:
        self.state = state
        self.kv = state.kv
        self.draft = draft
        self.now = now
        self._newcomers: set[int] = set()

    @cached_property
    def promised_blocks(self) -> int:
        """What those on board will still take of the free blocks. Kept up to date once it was asked for: with all seats
        taken, nobody asks."""
        return sum(self._blocks_to_come(request) for request in self.state.running) + self.state.aside

    def offer_seats(self, admission: PolicyDecision) -> bool:
        """False if the order has changed on the way: someone was overtaken once too often."""
        waiting, passed_over = self.state.waiting, list[Request]()
        if admission.reason_of_others is not None:
            waiting.note_rest(admission.reason_of_others)
        elif self._full(self.state.running, 1) and not self.state.ordering.takes_slots:
            waiting.note_rest(self._why_full(self.state.running, 1))  # no need to ask a long queue
            return True
        candidates = iter(admission.candidates)
        for request in candidates:
            obstacle = self._board(request)
            if obstacle is None:
                if waiting.count_passing(request, passed_over):
                    return False
                continue
            waiting.note(request, obstacle)
            if obstacle in (WaitReason.SIBLING, WaitReason.PREFIX):
                continue  # it waits for another request, not for room
            passed_over.append(request)
            reason_of_rest = self._why_stop_after(request, obstacle, len(passed_over))
            if reason_of_rest is None:
                continue
            if admission.reason_of_others is None:
                waiting.note_rest(reason_of_rest)
            else:
                for other in candidates:
                    waiting.note(other, reason_of_rest)
            return True
        return True

    def _why_stop_after(self, request: Request, obstacle: WaitReason, num_passed_over: int) -> WaitReason | None:
        """Why nobody behind `request`, who met this obstacle, can board; None if someone might."""
        # One who needs many seats may be passed by one who needs fewer, until he is starved.
        no_seat = obstacle in (WaitReason.SEATS, WaitReason.TARGET) and request.num_slots == 1
        if no_seat or not self.draft.prefill_room or num_passed_over >= MAX_PASSED_OVER:
            return obstacle
        return WaitReason.TURN if request.starved else None

    def _board(self, request: Request) -> WaitReason | None:
        """Give `request` a seat and its first tokens, or say what stands in the way (and change nothing)."""
        running = self.state.running
        if self.state.ordering.holds_back(request):
            return WaitReason.COURTESY
        if self._full(running, request.num_slots) and self.state.ordering.slot_to_take(request, running) is None:
            return self._why_full(running, request.num_slots)
        if not self.draft.room_for(request):
            return WaitReason.BUDGET
        swapped = request.num_computed  # in host memory; else nothing of a waiting request is computed
        match = self.kv.match(request)
        sibling = None if swapped else sibling_to_fork(request, running)
        if not swapped and waits_for_sibling(request, running):
            return WaitReason.SIBLING
        if sibling is not None:
            self.kv.fork(sibling, request, num_tokens=request.num_prompt - 1)
        elif match.coming and not swapped:
            return WaitReason.PREFIX
        else:
            self.kv.attach(request, match)
        cached = request.num_computed
        request.start_from(max(cached, swapped))
        obstacle = self._plan_first_tokens(request)
        if obstacle is not None:
            self.kv.release(request)
            request.start_from(swapped)
            return obstacle
        self.state.seat(request, cached, match.miss, self.now)
        self._newcomers.add(request.order)
        self.promised_blocks += self._blocks_to_come(request)
        return None

    def _plan_first_tokens(self, request: Request) -> WaitReason | None:
        promised = self.promised_blocks  # from before those on board take some of it
        # Those on board with a better claim to the prefill budget, or a shorter prompt, come first.
        share_rest_among_prompts(self.state, self.draft, before=self.state.urgency(request, self.draft))
        if not self.draft.room_for(request):
            return WaitReason.BUDGET
        leaving = self._who_must_leave(request, promised)
        if isinstance(leaving, WaitReason):
            return leaving
        for victim in leaving:
            together = [other for other in self.state.running if other in victim.companions]
            self.promised_blocks -= sum(self._blocks_to_come(other) for other in together)
            self.state.preempt(victim, self.now, self.draft)
        restored = self.kv.restore(request)
        count = self.draft.room_for(request)
        copies = None if restored is None else self.kv.reserve(request, count)
        if restored is None or copies is None:
            return WaitReason.MEMORY
        self.draft.add(request, count, self.kv, copies)
        if self.state.swap.holds(request):
            self.draft.swap_ins += self.state.swap.bring_back(request, restored)
        return None

    def _who_must_leave(self, request: Request, promised_blocks: int) -> list[Request] | WaitReason:
        """Those whose seats and blocks `request` may take, by the ordering, to fit on board; mostly none need to.

        It must fit with all its known tokens beside what those on board still need: boarding someone only to throw
        him out again is work done twice.
        """
        staying, leaving = self.state.running, list[Request]()
        spare = self.kv.num_free - promised_blocks - self._blocks_needed(request)
        while self._full(staying, request.num_slots) or spare < 0:
            victim = self.state.ordering.slot_to_take(request, staying)
            if victim is None or victim.order in self._newcomers:
                no_seat = self._full(staying, request.num_slots)
                return self._why_full(staying, request.num_slots) if no_seat else WaitReason.MEMORY
            together = [other for other in staying if other in victim.companions]
            staying = [other for other in staying if other not in together]
            leaving.append(victim)
            spare += self.kv.num_own(together) + sum(self._blocks_to_come(other) for other in together)
        return leaving

    def _full(self, running: Sequence[Request], seats: int) -> bool:
        """Whether there would be too few seats if these were running."""
        taken = self._taken(running)
        # With nobody on board, one who needs many seats gets them, whatever it does to the others' time per token.
        limit = min(self.state.max_batch_requests, max(self.draft.slots, 0 if taken else seats))
        return taken + seats > limit

    def _why_full(self, running: Sequence[Request], seats: int) -> WaitReason:
        return WaitReason.SEATS if self._taken(running) + seats > self.state.max_batch_requests else WaitReason.TARGET

    def _taken(self, running: Sequence[Request]) -> int:
        return slots_of(running) + len(self.state.idle) + self.state.aside

    def _blocks_needed(self, request: Request) -> int:
        """Blocks that it does not hold yet but needs for the tokens it knows; for a beam search, those of all beams."""
        others = request.group.blocks_to_join(self.kv) if request.group is not None else 0
        return self.kv.num_missing(request) + others

    def _blocks_to_come(self, request: Request) -> int:
        """What one on board still needs of that, and a spare block for the tokens to come."""
        return self._blocks_needed(request) + request.num_slots

"""From the queue to a seat: who gets on board in this step, and what keeps the others waiting."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.draft import PlanDraft
from chairlift.core.lift import Lift
from chairlift.core.packing import share_rest_among_prompts
from chairlift.core.policy import Admission, Policy
from chairlift.core.request import Request
from chairlift.core.siblings import sibling_to_fork, waits_for_sibling
from chairlift.core.waiting import WaitReason

MAX_PASSED_OVER = 32  # how many that do not fit are asked in one step before the rest of the queue is left alone


def board_waiting(lift: Lift, policy: Policy, draft: PlanDraft, now: float) -> None:
    lift.waiting.begin_boarding()
    if draft.memory_was_short:
        lift.waiting.note_rest(WaitReason.PREEMPTION)
        return
    boarding = _Boarding(lift, draft, now)
    while lift.waiting:
        admission = policy.admit(lift.waiting, lift.running, lift.max_batch_requests, now)
        if boarding.offer_seats(admission):
            return


class _Boarding:
    """The boarding of one step."""

    def __init__(self, lift: Lift, draft: PlanDraft, now: float) -> None:
        self.lift = lift
        self.kv = lift.kv
        self.draft = draft
        self.now = now
        # What those on board will still take of the free blocks.
        self.promised_blocks = sum(self._blocks_to_come(request) for request in lift.running)
        self._newcomers: set[int] = set()

    def offer_seats(self, admission: Admission) -> bool:
        """False if the order has changed on the way: someone was overtaken once too often."""
        waiting, passed_over = self.lift.waiting, list[Request]()
        if admission.reason_of_others is not None:
            waiting.note_rest(admission.reason_of_others)
        elif self._full(self.lift.running) and not self.lift.ordering.takes_seats:
            waiting.note_rest(self._why_full(self.lift.running))  # no need to ask a long queue
            return True
        candidates = iter(admission.candidates)
        for request in candidates:
            obstacle = self._board(request)
            if obstacle is None:
                if waiting.count_overtaking(request, passed_over):
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
        no_seat = obstacle in (WaitReason.SEATS, WaitReason.TARGET)
        if no_seat or not self.draft.prefill_room or num_passed_over >= MAX_PASSED_OVER:
            return obstacle
        return WaitReason.TURN if request.aged else None

    def _board(self, request: Request) -> WaitReason | None:
        """Give `request` a seat and its first tokens, or say what stands in the way (and change nothing)."""
        running = self.lift.running
        if self._full(running) and self.lift.ordering.seat_to_take(request, running) is None:
            return self._why_full(running)
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
        self.lift.seat(request, cached, match.miss, self.now)
        self._newcomers.add(request.order)
        self.promised_blocks += self._blocks_to_come(request)
        return None

    def _plan_first_tokens(self, request: Request) -> WaitReason | None:
        # Those on board with a better claim to the prefill budget, or a shorter prompt, come first.
        share_rest_among_prompts(self.lift, self.draft, before=self.lift.urgency(request, self.draft))
        if not self.draft.room_for(request):
            return WaitReason.BUDGET
        leaving = self._who_must_leave(request)
        if isinstance(leaving, WaitReason):
            return leaving
        for victim in leaving:
            self.promised_blocks -= self._blocks_to_come(victim)
            self.lift.preempt(victim, self.now, self.draft)
        restored = self.kv.restore(request)
        count = self.draft.room_for(request)
        copies = None if restored is None else self.kv.reserve(request, count)
        if restored is None or copies is None:
            return WaitReason.MEMORY
        self.draft.add(request, count, self.kv, copies)
        if self.lift.swap.holds(request):
            self.draft.swap_ins += self.lift.swap.bring_back(request, restored)
        return None

    def _who_must_leave(self, request: Request) -> list[Request] | WaitReason:
        """Those whose seats and blocks `request` may take, by the ordering, to fit on board; mostly none need to.

        It must fit with all its known tokens beside what those on board still need: boarding someone only to throw
        him out again is work done twice.
        """
        staying, leaving = self.lift.running, list[Request]()
        spare = self.kv.num_free - self.promised_blocks - self.kv.num_missing(request)
        while self._full(staying) or spare < 0:
            victim = self.lift.ordering.seat_to_take(request, staying)
            if victim is None or victim.order in self._newcomers:
                return self._why_full(staying) if self._full(staying) else WaitReason.MEMORY
            staying = [other for other in staying if other is not victim]
            leaving.append(victim)
            spare += self.kv.num_own(victim) + self._blocks_to_come(victim)
        return leaving

    def _full(self, running: Sequence[Request]) -> bool:
        """Whether there would be no seat if these were running."""
        return len(running) + len(self.lift.idle) >= min(self.lift.max_batch_requests, self.draft.seats)

    def _why_full(self, running: Sequence[Request]) -> WaitReason:
        taken = len(running) + len(self.lift.idle)
        return WaitReason.SEATS if taken >= self.lift.max_batch_requests else WaitReason.TARGET

    def _blocks_to_come(self, request: Request) -> int:
        """Blocks that one on board still needs for the tokens it knows, and a spare one for those to come."""
        return self.kv.num_missing(request) + 1

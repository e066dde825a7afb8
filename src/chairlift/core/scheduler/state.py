"""Who is on board, who waits, and how one changes into the other. Shared by all parts of the scheduler."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import TYPE_CHECKING

from chairlift.core.events import Event, RequestAdmitted, RequestPreempted
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import Miss
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.orderings.base import Ordering
from chairlift.core.plan import BlockSwap
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.waiting_queue import WaitingQueue
from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.core.beam.group import BeamGroup

Urgency = tuple[bool, float, int]


class SchedulerState:
    def __init__(
        self, kv: KVCache, ordering: Ordering, max_batch_requests: int, max_overtakes: int, swap: SwapSpace
    ) -> None:
        if max_batch_requests < 1:
            raise InvalidParameter("max_batch_requests", f"must be at least 1, got {max_batch_requests}")
        self.kv = kv
        self.ordering = ordering
        self.swap = swap
        self.max_batch_requests = max_batch_requests
        self.waiting = WaitingQueue(ordering, max_overtakes)
        self.running: list[Request] = []  # in order of submission, as `waiting` is
        self.idle: list[Request] = []  # finished, but their batch is not: they keep their seats (and their blocks)
        self.aside = 0  # how many more are on board and decode, but are kept elsewhere (a simulation does that)
        self.requests: dict[str, Request] = {}  # by id: all that are open, or still hold blocks
        self.events: list[Event] = []

    def seat(self, request: Request, cached_tokens: int, miss: Miss | None, now: float) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=lambda request: request.order)
        request.status = Status.RUNNING
        self.ordering.admitted(request)
        swapped_tokens = request.num_computed - cached_tokens
        self.events.append(RequestAdmitted(now, request.id, cached_tokens, miss, swapped_tokens))

    def join(self, beam: Request, now: float) -> None:
        """A beam takes one of the seats that its search has already."""
        self.events.append(RequestAdmitted(now, beam.id, beam.num_computed, miss=None))
        insort(self.running, beam, key=lambda request: request.order)
        beam.status = Status.RUNNING

    @property
    def slots_taken(self) -> int:
        return slots_of(self.running) + len(self.idle)

    def preempt(self, victim: Request, now: float, draft: PlanBuilder | None = None) -> None:
        """Take a request's blocks and seat, and its part of the step in the making. Its tokens stay known. Their keys
        and values wait in host memory, or are computed again when it is back on board (often found in the prefix cache
        by then). A beam search leaves as a whole, and always computes its tokens again."""
        if victim.group is not None:
            self._preempt_search(victim.group, now, draft)
            return
        swaps = self._swap_out(victim, draft) if draft is not None else None
        self.events.append(RequestPreempted(now, victim.id, victim.num_computed, swapped=swaps is not None))
        self._unseat(victim, 0 if swaps is None else victim.num_computed)
        self.waiting.add(victim)
        self.end_batch_if_over()

    def _preempt_search(self, group: BeamGroup, now: float, draft: PlanBuilder | None) -> None:
        for beam in group.members:
            if beam.status is Status.RUNNING:
                self.events.append(RequestPreempted(now, beam.id, beam.num_computed))
                if draft is not None:
                    draft.drop(beam)
                self._unseat(beam, 0)
        group.gather()
        self.waiting.add(group.leader)
        self.end_batch_if_over()

    def _unseat(self, victim: Request, num_computed: int) -> None:
        self.kv.release(victim)
        self.running.remove(victim)
        victim.start_from(num_computed)
        victim.generation += 1
        victim.status = Status.WAITING

    def _swap_out(self, victim: Request, draft: PlanBuilder) -> list[BlockSwap] | None:
        chunk = draft.drop(victim)
        # Blocks are copied on write by those who have just boarded, and they are no victims in the same step: so what
        # the victim's table names is there to be saved.
        assert chunk is None or not chunk.copies
        swaps = self.swap.take_out(victim, self.kv)
        draft.swap_outs += swaps or ()
        return swaps

    def forget_swap(self, request: Request) -> None:
        """What was to be copied to host memory was not, or perhaps not."""
        if self.swap.holds(request):
            self.swap.release(request)
            request.start_from(0)

    def end_batch_if_over(self) -> None:
        """With the last of a batch gone, what its finished requests kept is free at last."""
        if self.idle and not self.running and not self.aside:
            self.free_idle_slots()

    def free_idle_slots(self) -> None:
        idle, self.idle = self.idle, []
        for request in idle:
            self.let_go(request)

    def let_go(self, request: Request) -> None:
        """Give back what a finished request holds, unless a step under way may still write to its blocks (then this
        is called again when that step is done) or its batch is not over."""
        if request.steps_in_flight == 0 and request not in self.idle:
            self.kv.release(request)
            self.swap.release(request)
            del self.requests[request.id]

    def take_idle_blocks(self) -> bool:
        """Before anyone who is still running gives way, the finished requests of a batch do; False if none can."""
        for request in self.idle:
            if self.kv.table(request) and request.steps_in_flight == 0:
                self.kv.release(request)
                return True
        return False

    def unserved_prompts(self, draft: PlanBuilder) -> list[Request]:
        """Those on board whose known tokens will not all be computed with this step."""
        return [request for request in self.running if not request.decoding and draft.num_behind(request)]

    def urgency(self, request: Request, draft: PlanBuilder) -> Urgency:
        """Who gets what is left of the prefill budget: as the order says, but among equal claims whoever has the
        fewest tokens left to compute."""
        not_starved, claim, _ = self.ordering.rank(request)
        return not_starved, claim, draft.num_behind(request)


def slots_of(requests: Iterable[Request]) -> int:
    return sum(request.num_slots for request in requests)

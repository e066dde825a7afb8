"""The tokens of those on board: every decode, then prompts."""

from __future__ import annotations

from chairlift.core.plan import BlockCopy
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.state import SchedulerState, Urgency


def decode(state: SchedulerState, draft: PlanBuilder, now: float) -> None:
    """One token for everyone who is one behind: running requests never wait for a new prompt."""
    for request in [request for request in state.running if request.decoding]:
        if request.num_behind and draft.room > 0:
            copies = _reserve(request, 1, state, draft, now)
            if copies is not None:
                draft.add_decode(request, state.kv.table(request), copies)


def advance_prompts(state: SchedulerState, draft: PlanBuilder, now: float) -> None:
    """Half of the room (or all of it, with nobody to share it) goes by the order; the rest will go to the shortest
    first, newcomers included. So a long prompt does not hold up those behind it, nor is it ever held up itself."""
    prompts = sorted((request for request in state.running if not request.decoding), key=state.ordering.rank)
    if not prompts:
        return
    shared = draft.prefill_room // 2 if len(prompts) > 1 or state.waiting else 0
    best_waiting = state.waiting.best_claim()
    for request in prompts:
        if best_waiting is not None and best_waiting < state.ordering.rank(request)[:2]:
            return  # whoever boards with a better claim is served first
        _compute(request, min(draft.room_for(request), draft.prefill_room - shared), state, draft, now)


def share_rest_among_prompts(state: SchedulerState, draft: PlanBuilder, before: Urgency | None = None) -> None:
    """What is left of the room for prompts, to the most urgent first; if `before` is given, only to those who are
    more urgent than that."""
    if not draft.prefill_room:
        return
    unserved = [(state.urgency(request, draft), request.order, request) for request in state.unserved_prompts(draft)]
    for urgency, _, request in sorted(unserved, key=lambda entry: entry[:2]):
        if before is not None and urgency >= before:
            return
        count = draft.room_for(request)
        if not count:
            continue  # its tenant is held back; others may not be
        copies = state.kv.reserve(request, draft.count(request) + count)
        if copies is not None:
            draft.add(request, count, state.kv, copies)


def keep_moving(state: SchedulerState, draft: PlanBuilder, now: float) -> None:
    """If nobody computes anything, the first prompt on board does, at the expense of others if memory is short: one who
    comes before it was expected to board, and did not."""
    for request in sorted(state.running, key=state.ordering.rank):
        if draft.chunks:
            return
        _compute(request, draft.room_for(request), state, draft, now)


def _compute(request: Request, count: int, state: SchedulerState, draft: PlanBuilder, now: float) -> None:
    """Plan `count` tokens of one on board."""
    copies = _reserve(request, count, state, draft, now) if count > 0 else None
    if copies is not None:
        draft.add(request, count, state.kv, copies)


def _reserve(
    request: Request, count: int, state: SchedulerState, draft: PlanBuilder, now: float
) -> tuple[BlockCopy, ...] | None:
    """Make room for `count` tokens of one on board, at the expense of others if memory is short. None if it has to give
    way itself."""
    if draft.memory_was_short and request.status is not Status.RUNNING:
        return None  # someone ahead has preempted it meanwhile
    while (copies := state.kv.reserve(request, count)) is None:
        if state.take_idle_blocks():
            continue
        draft.memory_was_short = True
        victim = state.ordering.victim(state.running)
        state.preempt(victim, now, draft)
        if request in victim.companions:
            return None
    return copies

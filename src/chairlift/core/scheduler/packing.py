"""Plans the tokens of running requests: all decodes, then prompts."""

from __future__ import annotations

from chairlift.core.plan import BlockCopy, PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.state import SchedulerState, Urgency


def plan_decodes(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    """Plan one token for every decoding request, before any prompt."""
    for request in [request for request in state.running if request.decoding]:
        if request.num_behind and builder.room > 0:
            copies = _reserve(request, 1, state, builder, now)
            if copies is not None:
                builder.add_decode(request, state.kv.table(request), copies)


def advance_prompts(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    """Give half of the prefill budget (all of it for a single prompt without a queue) to running prompts in order.

    `share_rest_among_prompts` gives the other half to the shortest prompts, including newly admitted ones. So a long
    prompt neither blocks shorter ones nor is blocked by them.
    """
    prompts = sorted((request for request in state.running if not request.decoding), key=state.ordering.rank)
    if not prompts:
        return
    shared = builder.prefill_room // 2 if len(prompts) > 1 or state.waiting else 0
    best_waiting = state.waiting.best_claim()
    for request in prompts:
        if best_waiting is not None and best_waiting < state.ordering.rank(request)[:2]:
            return  # a waiting request with a better claim is admitted first
        _plan_tokens(request, builder.room_for(request, builder.prefill_room - shared), state, builder, now)


def share_rest_among_prompts(state: SchedulerState, builder: PlanBuilder, before: Urgency | None = None) -> None:
    """Give the rest of the prefill budget to prompts by urgency; with `before`, only to those more urgent than it."""
    if builder.prefill_room <= 0:
        return
    unserved = [
        (state.urgency(request, builder), request.order, request) for request in state.unserved_prompts(builder)
    ]
    for urgency, _, request in sorted(unserved, key=lambda entry: entry[:2]):
        if before is not None and urgency >= before:
            return
        count = builder.room_for(request)
        if count <= 0:
            continue  # its tenant is limited, or an image is not encoded; that may not hold for others
        copies = state.kv.reserve(request, builder.count(request) + count)
        if copies is not None:
            builder.add(request, count, state.kv.table(request), copies)


def ensure_progress(state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    """If the plan is empty, plan the first running prompt, preempting others if memory is short.

    The plan is empty if a waiting request had a better claim but could not be admitted.
    """
    if builder.chunks:
        return
    for request in sorted(state.running, key=state.ordering.rank):
        if builder.chunks:
            return
        _plan_tokens(request, builder.room_for(request), state, builder, now)


def _plan_tokens(request: Request, count: int, state: SchedulerState, builder: PlanBuilder, now: float) -> None:
    """Plan `count` tokens of a running request."""
    copies = _reserve(request, count, state, builder, now) if count > 0 else None
    if copies is not None:
        builder.add(request, count, state.kv.table(request), copies)


def _reserve(
    request: Request, count: int, state: SchedulerState, builder: PlanBuilder, now: float
) -> tuple[BlockCopy, ...] | None:
    """Reserve blocks for `count` tokens of a running request, preempting others if memory is short; None if the
    request is preempted itself."""
    if builder.memory_was_short and request.status is not Status.RUNNING:
        return None  # preempted by a request before it
    while (copies := state.kv.reserve(request, count)) is None:
        if state.take_idle_blocks():
            continue
        if state.kv.loads is not None and state.kv.loads.will_release:
            return None  # They are cached blocks in a moment; nothing is preempted for them.
        builder.memory_was_short = True
        victim = state.ordering.victim(state.running)
        state.preempt(victim, now, builder)
        if request in victim.companions:
            return None
    return copies

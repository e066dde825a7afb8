"""Plans the work on images: which are encoded in a step, within its prefill budget."""

from __future__ import annotations

from chairlift.core.encoder_cache import EncoderCache
from chairlift.core.images import PromptImage
from chairlift.core.plan import PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.state import SchedulerState

MAX_AHEAD = 16  # waiting requests whose images may be encoded before they are admitted


def plan_encoding(state: SchedulerState, builder: PlanBuilder) -> None:
    """Plan slices of work for the images that running prompts need next, then for those of waiting requests.

    Decodes are planned before, so that they never wait. With other prompts, images get half of what is left, so that
    neither blocks the other.
    """
    cache = builder.images
    if cache is None or not cache.may_plan or builder.prefill_room <= 0:
        return
    wanted = _wanted_images(state, cache)
    others = any(not request.decoding and not request.images for request in state.running)
    others = others or any(not request.images for request in state.waiting[:MAX_AHEAD])
    room = max(1, builder.prefill_room // 2) if others else builder.prefill_room
    builder.encoding, spent = cache.plan(wanted, room)
    builder.spend_on_images(spent)


def _wanted_images(state: SchedulerState, cache: EncoderCache) -> list[tuple[Request, PromptImage]]:
    """The images that requests need: of each the next one, then all others, since one lets its request go on."""
    ranked = sorted(cache.open.values(), key=state.ordering.rank)
    running = [request for request in ranked if request.status is Status.RUNNING and not request.decoding]
    waiting = [request for request in ranked if request.status is Status.WAITING and request.ready]
    first, later = list[tuple[Request, PromptImage]](), list[tuple[Request, PromptImage]]()
    for request in (*running, *waiting[:MAX_AHEAD]):
        start = _next_position(state, request)
        needed = [image for image in request.images if image.end > start]
        first += [(request, image) for image in needed[:1]]
        later += [(request, image) for image in needed[1:]]
    return first + later


def _next_position(state: SchedulerState, request: Request) -> int:
    """Where the next chunk of a request begins; the end of its prompt if another request computes what it needs."""
    if request.status is Status.RUNNING or request.num_computed:
        return request.num_planned
    leader = request.leader
    if leader is not None and leader.status is not Status.FINISHED and not request.num_output:
        return request.num_prompt
    match = state.kv.match(request)
    return request.num_prompt if match.in_progress else len(match.blocks) * state.kv.block_size

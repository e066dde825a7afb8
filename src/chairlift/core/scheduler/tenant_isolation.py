"""Keeps steps short for tenants with occasional requests while another tenant fills the batch.

A *heavy* tenant has many open requests; a *light* tenant has few or none, but sent a request recently. A new request
waits for the step in flight, which can no longer be changed. If that step is full of prompts of a heavy tenant, a light
tenant with a short prompt waits longer for it than for its own step. So while there are light tenants, the heavy
tenants' part of a step (their prompts, then their slots) is limited such that both waits together stay within twice the
time of the light tenant's prompt alone. If the step with the first token of a light tenant would still end later than
that, the chunks of heavy tenants are dropped from it, but never from two steps in a row.

    |--- step in flight ---|--- step of the light tenant ---|   the first may take as long as its prompt alone
    |-- its prompt alone --|                                    (less what decodes add to all but its last step)

The prompt that counts is the median of those that light tenants sent recently. Heavy tenants keep a fifth of the
highest speed of prompts. Running requests stay, so heavy tenants lose slots only as their requests end, and they keep
an eighth of all slots.
Nothing is limited without both kinds of tenants, or if the prompts of light tenants take longer than any step. A light
tenant that was served more than a heavy one is not isolated from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.core.cost_model import StepShape, chunk_kv
from chairlift.core.orderings.base import Ordering
from chairlift.core.orderings.fair import FairOrdering
from chairlift.core.plan import Chunk, PlanBuilder
from chairlift.core.request import Request
from chairlift.core.scheduler.state import SchedulerState

_LEAST = 4  # prompt tokens that heavy tenants always get, so that they do not starve
_LEAST_SPEED = 0.2  # share of the highest speed of prompts that they keep
_LEAST_SLOTS = 0.125  # share of the slots that they keep
_MOST_WAIT = 2.0  # a first token is due after this multiple of the time of its prompt alone


@dataclass(frozen=True, slots=True)
class _IdleCost:
    """The cost of a prompt in an empty batch."""

    seconds: float
    steps: int


class TenantIsolation:
    """Limits the part of heavy tenants in a step, and drops it from steps that would be too late for a light tenant."""

    def __init__(self, ordering: FairOrdering, predict: Callable[[StepShape], float], step_tokens: int) -> None:
        """`predict`: the seconds of a step, 0 before any is measured; `step_tokens`: the most prompt tokens of one."""
        self._ordering = ordering
        self._predict = predict
        self._step_tokens = step_tokens
        self._heavy: set[str] = set()  # tenants that are limited
        self._light: set[str] = set()  # tenants that wait for a first token and were served no more than any heavy one
        self._dropped = False  # chunks of heavy tenants were dropped from the last step
        self._planned_at = self._planned_before = 0.0  # planning times of the last two steps

    def limit_heavy_tenants(self, state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        """Limit the part of heavy tenants in the step being built."""
        self._planned_before, self._planned_at = self._planned_at, now
        heavy = self._ordering.heavy_tenants()
        prompt = self._ordering.usual_light_prompt(now) if heavy else None
        light = self._idle_cost(prompt) if prompt is not None else _IdleCost(0.0, 0)
        self._heavy = heavy if light.seconds else set()
        if not self._heavy:  # no light tenant, or nothing measured yet
            self._light, self._ordering.held_back = set(), set()
            return
        decoding = [request for request in state.running if request.decoding]
        room, least_room = self._room(light, decoding)
        least = min(self._ordering.served(tenant) for tenant in heavy)
        self._light = {
            request.tenant
            for request in (*state.running, *state.waiting)
            if request.tenant not in heavy
            and request.ready
            and not request.decoding
            and self._ordering.served(request.tenant) <= least
        }
        if self._light:
            room = least_room  # a light tenant waits for this step already
        builder.limit_tenants(heavy, room)
        full = len(state.running) >= self._slots(light, decoding, state.max_batch_requests)
        self._ordering.held_back = heavy if full else set()

    def drop_heavy_chunks(self, state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        """Drop the chunks of heavy tenants from a step that would end too late for the first token of a light one."""
        dropped_before, self._dropped = self._dropped, False
        if dropped_before or not self._heavy or not self._light:
            return
        chunks = tuple(builder.chunks.values())
        first = [chunk.request for chunk in chunks if chunk.request.tenant in self._light and _is_first(chunk)]
        if not first:
            return
        ends = now + self._predict(StepShape.of_chunks(chunks, len(state.idle)))
        if all(ends <= self._due(request) for request in first):
            return
        # Chunks whose blocks are targets of copies of this step must stay in it: if the step is abandoned, only
        # requests with a chunk are reset.
        bound = {swap.request.id for swap in builder.swap_ins} | {chunk.request.id for chunk in chunks if chunk.copies}
        for chunk in chunks:
            if chunk.request.tenant in self._heavy and chunk.request.id not in bound:
                builder.drop(chunk.request)
                self._dropped = True

    def _due(self, request: Request) -> float:
        """When the first token is due. A request is submitted between two steps, so it may have waited for a whole step
        before its arrival was recorded."""
        unseen = self._planned_at - self._planned_before
        return request.arrival - unseen + _MOST_WAIT * self._idle_cost(request.num_prompt).seconds

    def _room(self, light: _IdleCost, decoding: Sequence[Request]) -> tuple[int, int]:
        """The most prompt tokens of heavy tenants that keep a light tenant within its limit beside these decodes, and
        the fewest that they always get. Where a step has a high price of its own, smaller ones would be a waste."""
        size, context = len(decoding), sum(request.num_expected for request in decoding)

        def seconds(chunk: int) -> float:
            return self._predict(StepShape(size, chunk, context, chunk_kv(0, chunk), size + (chunk > 0)))

        def speed(chunk: int) -> float:
            return chunk / max(seconds(chunk), 1e-9)

        allowed = light.seconds - (light.steps - 1) * (seconds(0) - self._predict(StepShape()))
        sizes = range(1, self._step_tokens + 1)
        least = 1 + bisect_left(sizes, _LEAST_SPEED * speed(self._step_tokens), hi=self._step_tokens - 1, key=speed)
        least = max(least, min(_LEAST, self._step_tokens))
        return max(least, bisect_right(sizes, allowed, key=seconds)), least

    def _slots(self, light: _IdleCost, decoding: Sequence[Request], slots: int) -> int:
        """The most decodes, in the step in flight and the next one, that keep a light tenant within its limit."""
        context = sum(request.num_expected for request in decoding) // max(1, len(decoding))
        empty = self._predict(StepShape())

        def wait(size: int) -> float:
            seconds = self._predict(StepShape(size, _LEAST, size * context, chunk_kv(0, _LEAST), size + 1))
            return seconds + (light.steps - 1) * (seconds - empty)

        return max(int(_LEAST_SLOTS * slots), 1, bisect_right(range(1, slots + 1), light.seconds, key=wait))

    def _idle_cost(self, prompt: int) -> _IdleCost:
        seconds, steps, done = 0.0, 0, 0
        while done < prompt:
            chunk = min(prompt - done, self._step_tokens)
            shape = StepShape(prefill_tokens=chunk, prefill_kv=chunk_kv(done, chunk), requests=1)
            seconds, steps, done = seconds + self._predict(shape), steps + 1, done + chunk
        return _IdleCost(seconds, steps)


def _is_first(chunk: Chunk) -> bool:
    """Whether the chunk computes the first token of its request, and no step in flight does."""
    return chunk.samples and not (chunk.request.num_output or chunk.request.num_unread)


def make_tenant_isolation(
    ordering: Ordering, predict: Callable[[StepShape], float], step_tokens: int
) -> TenantIsolation | None:
    """Build tenant isolation for the ordering `fair`; None for others."""
    return TenantIsolation(ordering, predict, step_tokens) if isinstance(ordering, FairOrdering) else None

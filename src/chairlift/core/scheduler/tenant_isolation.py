"""Keeps steps short for tenants with occasional requests while another tenant keeps the batch full.

A *crowd* is a tenant with many open requests; a *guest* is another tenant, with few or none, that was here lately. A
new request waits for the step in flight, which cannot be changed any more. If that step is full of a crowd's prompts,
a guest with a short prompt waits longer for it than for its own step. So as long as there are guests, a crowd's part
of a step (its prompts, and then its slots) is limited such that a guest's two waits together stay within twice the
time of its prompt alone. If the step that computes a guest's first token would take longer than that leaves, the
crowd is left out of it, though never from two steps in a row.

    |--- step in flight ---|--- the guest's own ---|         the first may take as long as the guest's prompt alone
    |-- guest's prompt alone --|                             (less what decodes add to all but its last step)

Running requests stay, so a crowd loses slots only as its requests end, and it keeps an eighth of all slots. Without a
guest or a crowd, or if the guests' prompts take longer than any step, nothing is held back. A guest that was served
more than the crowd has no such claim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift.core.cost_model import StepShape, chunk_kv
from chairlift.core.orderings.base import Ordering
from chairlift.core.orderings.fair import FairOrdering
from chairlift.core.plan import Chunk
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.request import Request
from chairlift.core.scheduler.state import SchedulerState

_LEAST = 4  # prompt tokens that a crowd always gets: it must not starve
_LEAST_SLOTS = 0.125
_MOST_WAIT = 2.0  # times the duration of a guest's prompt alone: when its first token is due


class StepTimes(Protocol):
    def predict(self, shape: StepShape) -> float:
        """Seconds; 0 before anything is measured."""
        ...


@dataclass(frozen=True, slots=True)
class _Alone:
    """The cost of a guest's prompt on an idle machine."""

    seconds: float
    steps: int


class TenantIsolation:
    """Limits what crowds take of a step, and drops them from a step that would be too late for a guest."""

    def __init__(self, ordering: FairOrdering, times: StepTimes, step_tokens: int) -> None:
        """`step_tokens`: the most prompt tokens of a step."""
        self._ordering = ordering
        self._times = times
        self._step_tokens = step_tokens
        self._crowds: set[str] = set()  # tenants that are held back
        self._guests: set[str] = set()  # tenants that wait for a first token and were served no more than any crowd
        self._gave_way = False  # a crowd was left out of the last step
        self._planned_at = self._planned_before = 0.0  # when the last step was planned, and the one before it

    def hold_back(self, state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        """Limit what crowds may take of the step being built."""
        self._planned_before, self._planned_at = self._planned_at, now
        crowds = self._ordering.crowds()
        prompt = self._ordering.shortest_guest_prompt(now) if crowds else None
        guest = self._alone(prompt) if prompt is not None else _Alone(0.0, 0)
        self._crowds = crowds if guest.seconds else set()
        if not self._crowds:  # no guest, or nothing measured yet
            self._guests, self._ordering.held_back = set(), set()
            return
        decoding = [request for request in state.running if request.decoding]
        room = self._room(guest, decoding)
        least = min(self._ordering.served(tenant) for tenant in crowds)
        self._guests = {
            request.tenant
            for request in (*state.running, *state.waiting)
            if request.tenant not in crowds
            and request.ready
            and not request.decoding
            and self._ordering.served(request.tenant) <= least  # else it had its share already
        }
        if self._guests:
            room = min(room, _LEAST)  # a guest waits for this step and for its own
        builder.restrain(crowds, room)
        full = len(state.running) >= self._slots(guest, decoding, state.max_batch_requests)
        self._ordering.held_back = crowds if full else set()

    def give_way(self, state: SchedulerState, builder: PlanBuilder, now: float) -> None:
        """If the step would compute a guest's first token too late, drop the crowd's chunks from it."""
        gave_way, self._gave_way = self._gave_way, False
        if gave_way or not self._crowds or not self._guests:
            return
        chunks = tuple(builder.chunks.values())
        first = [chunk.request for chunk in chunks if chunk.request.tenant in self._guests and _is_first(chunk)]
        if not first:
            return
        ends = now + self._times.predict(StepShape.of_chunks(chunks, len(state.idle)))
        if all(ends <= self._due(request) for request in first):
            return
        # Chunks whose blocks are written by copies of this step must stay in it: should another step be interrupted,
        # their requests would not be set back.
        bound = {swap.request.id for swap in builder.swap_ins} | {chunk.request.id for chunk in chunks if chunk.copies}
        for chunk in chunks:
            if chunk.request.tenant in self._crowds and chunk.request.id not in bound:
                builder.drop(chunk.request)
                self._gave_way = True

    def _due(self, guest: Request) -> float:
        """When its first token is due. Requests are taken in between two steps, so that it may have waited for a whole
        step before its arrival was noted."""
        unseen = self._planned_at - self._planned_before
        return guest.arrival - unseen + _MOST_WAIT * self._alone(guest.num_prompt).seconds

    def _room(self, guest: _Alone, decoding: Sequence[Request]) -> int:
        """Prompt tokens of a crowd that keep such a guest within its limit beside these decodes."""
        size, context = len(decoding), sum(request.num_expected for request in decoding)

        def seconds(chunk: int) -> float:
            return self._times.predict(StepShape(size, chunk, context, chunk_kv(0, chunk), size + (chunk > 0)))

        allowed = guest.seconds - (guest.steps - 1) * (seconds(0) - self._times.predict(StepShape()))
        return max(_LEAST, bisect_right(range(1, self._step_tokens + 1), allowed, key=seconds))

    def _slots(self, guest: _Alone, decoding: Sequence[Request], slots: int) -> int:
        """The most decodes beside a guest, in the step in flight and its own, that keep it within its limit."""
        context = sum(request.num_expected for request in decoding) // max(1, len(decoding))
        empty = self._times.predict(StepShape())

        def waits(size: int) -> float:
            seconds = self._times.predict(StepShape(size, _LEAST, size * context, chunk_kv(0, _LEAST), size + 1))
            return seconds + (guest.steps - 1) * (seconds - empty)

        return max(int(_LEAST_SLOTS * slots), 1, bisect_right(range(1, slots + 1), guest.seconds, key=waits))

    def _alone(self, prompt: int) -> _Alone:
        seconds, steps, done = 0.0, 0, 0
        while done < prompt:
            chunk = min(prompt - done, self._step_tokens)
            shape = StepShape(prefill_tokens=chunk, prefill_kv=chunk_kv(done, chunk), requests=1)
            seconds, steps, done = seconds + self._times.predict(shape), steps + 1, done + chunk
        return _Alone(seconds, steps)


def _is_first(chunk: Chunk) -> bool:
    """Whether it computes the first token of its request; one that a step in flight computes counts too."""
    return chunk.samples and not (chunk.request.num_output or chunk.request.num_unread)


def make_tenant_isolation(ordering: Ordering, times: StepTimes, step_tokens: int) -> TenantIsolation | None:
    """Tenant isolation for an ordering that shares between tenants; None for others."""
    return TenantIsolation(ordering, times, step_tokens) if isinstance(ordering, FairOrdering) else None

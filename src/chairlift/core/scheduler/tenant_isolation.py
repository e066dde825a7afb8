"""Short steps for those who come now and then, while a crowd keeps the batch full.

Whoever arrives waits for the step under way, and nothing can be done about that any more. If it is a step full of a
crowd's prompts, a guest with a short prompt waits longer for it than for its own. So as long as there are guests, the
crowd's part of a step (its prompts, and then its seats) is such that a guest's two waits together stay within twice its
time alone. If the step that computes a guest's first token would take longer than that leaves, it is the guest's own:
the crowd sits it out, though never two steps in a row.

    |--- step under way ---|--- the guest's own ---|         the first may take as long as the guest's prompt alone
    |-- guest's prompt alone --|                             (less what decodes add to all but its last step)

Those on board stay, so seats are given up as requests end; and an eighth of all is left to the crowd in any case. A
crowd is a tenant with many open requests; a guest is another one, who has few or none, but came lately. With no
guest, or no crowd, or guests whose prompts take longer than any step, nothing is held back. And a guest who was served
more than the crowd was waits its turn like all.
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
_LEAST_SEATS = 0.125
_MOST_WAIT = 2.0  # times what a guest's prompt takes alone: until when it should have its first token


class StepTimes(Protocol):
    def predict(self, shape: StepShape) -> float:
        """Seconds; 0 if nothing is known yet."""
        ...


@dataclass(frozen=True, slots=True)
class _Alone:
    """What a guest's prompt takes with nobody else there."""

    seconds: float
    steps: int


class TenantIsolation:
    def __init__(self, ordering: FairOrdering, times: StepTimes, step_tokens: int) -> None:
        """`step_tokens`: the most prompt tokens of a step."""
        self._ordering = ordering
        self._times = times
        self._step_tokens = step_tokens
        self._crowds: set[str] = set()  # those who are held back
        self._guests: set[str] = set()  # those who wait for a first token, and were served no more than any crowd
        self._gave_way = False  # a crowd has just sat out a step
        self._planned_at = self._planned_before = 0.0  # when the last step was planned, and the one before it

    def hold_back(self, state: SchedulerState, draft: PlanBuilder, now: float) -> None:
        """Limit what a crowd may take of the step that `draft` is to become."""
        self._planned_before, self._planned_at = self._planned_at, now
        crowds = self._ordering.crowds()
        prompt = self._ordering.shortest_guest_prompt(now) if crowds else None
        guest = self._alone(prompt) if prompt is not None else _Alone(0.0, 0)
        self._crowds = crowds if guest.seconds else set()
        if not self._crowds:  # nobody to think of, or nothing known yet
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
            and self._ordering.served(request.tenant) <= least  # else it had its share already, and waits its turn
        }
        if self._guests:
            room = min(room, _LEAST)  # a guest is here, and waits for this step and its own
        draft.restrain(crowds, room)
        full = len(state.running) >= self._seats(guest, decoding, state.max_batch_requests)
        self._ordering.held_back = crowds if full else set()

    def give_way(self, state: SchedulerState, draft: PlanBuilder, now: float) -> None:
        """If the step in `draft` would compute a guest's first token too late, take out of it what is the crowd's."""
        sat_out, self._gave_way = self._gave_way, False
        if sat_out or not self._crowds or not self._guests:
            return
        chunks = tuple(draft.chunks.values())
        first = [chunk.request for chunk in chunks if chunk.request.tenant in self._guests and _is_first(chunk)]
        if not first:
            return
        ends = now + self._times.predict(StepShape.of_chunks(chunks, len(state.idle)))
        if all(ends <= self._due(request) for request in first):
            return
        # Their blocks are written by copies of this very step, which must not be left to a step that has no such chunk:
        # should it be interrupted, nobody would set them back.
        bound = {swap.request.id for swap in draft.swap_ins} | {chunk.request.id for chunk in chunks if chunk.copies}
        for chunk in chunks:
            if chunk.request.tenant in self._crowds and chunk.request.id not in bound:
                draft.drop(chunk.request)
                self._gave_way = True

    def _due(self, guest: Request) -> float:
        """When it should have its first token. It is known since its arrival; but requests are taken in between two
        steps, so that it may have waited for a whole one before."""
        unseen = self._planned_at - self._planned_before
        return guest.arrival - unseen + _MOST_WAIT * self._alone(guest.num_prompt).seconds

    def _room(self, guest: _Alone, decoding: Sequence[Request]) -> int:
        """Prompt tokens of a crowd that such a guest can put up with beside these decodes."""
        size, context = len(decoding), sum(request.num_expected for request in decoding)

        def seconds(chunk: int) -> float:
            return self._times.predict(StepShape(size, chunk, context, chunk_kv(0, chunk), size + (chunk > 0)))

        allowed = guest.seconds - (guest.steps - 1) * (seconds(0) - self._times.predict(StepShape()))
        return max(_LEAST, bisect_right(range(1, self._step_tokens + 1), allowed, key=seconds))

    def _seats(self, guest: _Alone, decoding: Sequence[Request], seats: int) -> int:
        """The most decodes that such a guest can bear in the step under way, and in all but the last of its own."""
        context = sum(request.num_expected for request in decoding) // max(1, len(decoding))
        empty = self._times.predict(StepShape())

        def waits(size: int) -> float:
            seconds = self._times.predict(StepShape(size, _LEAST, size * context, chunk_kv(0, _LEAST), size + 1))
            return seconds + (guest.steps - 1) * (seconds - empty)

        return max(int(_LEAST_SEATS * seats), 1, bisect_right(range(1, seats + 1), guest.seconds, key=waits))

    def _alone(self, prompt: int) -> _Alone:
        seconds, steps, done = 0.0, 0, 0
        while done < prompt:
            chunk = min(prompt - done, self._step_tokens)
            shape = StepShape(prefill_tokens=chunk, prefill_kv=chunk_kv(done, chunk), requests=1)
            seconds, steps, done = seconds + self._times.predict(shape), steps + 1, done + chunk
        return _Alone(seconds, steps)


def _is_first(chunk: Chunk) -> bool:
    """Whether it computes its request's first token. One that a step under way computes is not known yet."""
    return chunk.samples and not (chunk.request.num_output or chunk.request.num_unread)


def make_tenant_isolation(ordering: Ordering, times: StepTimes, step_tokens: int) -> TenantIsolation | None:
    """Tenant isolation for an ordering that shares between tenants; None for others."""
    return TenantIsolation(ordering, times, step_tokens) if isinstance(ordering, FairOrdering) else None

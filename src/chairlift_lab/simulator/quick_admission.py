"""The queue of a simulated engine, and admission without the scheduler.

If all new requests with a slot and blocks fit into the next step with their whole prompts, the scheduler has nothing to
decide: they are admitted, and set aside at its end like the others (`steady_decodes.py`). The result is the same as
that of `core/scheduler/admission.py` for first come, first served; for other orders only with one new request at a
time; with a prefix cache only if they fit even without a hit. In all other cases the scheduler plans the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from chairlift.core.kv.prefix_index import PrefixMatch
from chairlift.core.plan import NO_LIMIT, StepLimits
from chairlift.core.scheduler.admission import MAX_PASSED_OVER
from chairlift_lab.simulator.scheduler import SimulatedRequest
from chairlift_lab.simulator.steady_decodes import SteadyDecodes


@dataclass(slots=True)
class _Decision:
    """The requests that the next step admits."""

    admitted: list[SimulatedRequest] = field(default_factory=list)
    passed_over: list[tuple[SimulatedRequest, int]] = field(default_factory=list)  # The number counts those before it.
    blocks: int = 0  # taken by the admitted
    least_missed: int = NO_LIMIT  # the fewest blocks that a request without enough needs
    reached_end: bool = True  # the whole queue was tried


class QuickAdmission:
    """Admits requests to a `SteadyDecodes` without the scheduler where the result is the same."""

    def __init__(self, aside: SteadyDecodes, limits: StepLimits) -> None:
        self._aside = aside
        self._limits = limits
        self._scheduler = aside.scheduler
        self._kv = aside.scheduler.kv
        self._none_fits = False  # when they were last tried
        # The scheduler admitted none beside the requests set aside, and none has ended or arrived since. What it could
        # give only shrinks while they decode.
        self.blocked = False
        self._least_missed = 0  # none fits with fewer free blocks either, until the queue changes ...
        self._reached_end = False  # ... for which one more request is enough
        self._unsubmitted: deque[SimulatedRequest] = deque()  # younger than all submitted ones

    def add(self, simulated: SimulatedRequest) -> None:
        self.blocked = False
        self._unsubmitted.append(simulated)
        if self._reached_end:
            self._least_missed = min(self._least_missed, self._kv.blocks_for(simulated.record.n_in))

    def submit_queue(self) -> None:
        """Submit as many requests to the scheduler as it can try in a step."""
        scheduler, self._least_missed = self._scheduler, 0
        slots = scheduler.max_batch_requests - len(scheduler.running) - self._aside.size
        enough = slots + MAX_PASSED_OVER + 1
        # It tries any number of requests that wait for a prefix, and sorts all to find the first.
        if self._kv.prefix_caching or scheduler.ordering.has_claims:
            enough = len(scheduler.waiting) + len(self._unsubmitted)
        while self._unsubmitted and len(scheduler.waiting) < enough:
            self._scheduler.enter(self._unsubmitted.popleft())

    def admits_none(self) -> bool:
        """Whether no request can be admitted before one of those set aside, the only ones running, ends."""
        if not self._unsubmitted and not self._scheduler.waiting:
            return True
        if self._aside.size >= self._scheduler.max_batch_requests:
            return True
        return self._none_fits or self.blocked  # There are never more blocks until then.

    def admit(self) -> list[SimulatedRequest]:
        """Admit requests whose whole prompts fit into the next step. If there are none, the scheduler must plan the
        step unless `admits_none`."""
        scheduler, self._none_fits = self._scheduler, False
        if self.blocked or not scheduler.admits_with_room_to_grow:
            return []
        if scheduler.running or scheduler.swap.num_slots or self._aside.size >= scheduler.max_batch_requests:
            return []
        if scheduler.ordering.has_claims and len(self._unsubmitted) + len(scheduler.waiting) > 1:
            return []
        if self._kv.prefix_caching:
            return self._admit_sharing()
        if self._blocks_to_give() < self._least_missed:
            self._none_fits = True
            return []
        decision = self._decide()
        self._none_fits = decision is not None and not decision.admitted
        self._least_missed = 0
        if decision is None:
            return []
        if not decision.admitted:
            self._least_missed, self._reached_end = decision.least_missed, decision.reached_end
            return []
        for simulated, before in decision.passed_over:
            passing = len(decision.admitted) - before
            if passing:
                if simulated.request is None:
                    self._unsubmitted.remove(simulated)
                (simulated.request or self._scheduler.enter(simulated)).times_passed_over += passing
        for simulated in decision.admitted:
            if simulated.request is None:
                self._unsubmitted.remove(simulated)
            else:
                self._scheduler.start(simulated.request)
        self._kv.pool.count_used(decision.blocks)
        return decision.admitted

    def _decide(self) -> _Decision | None:
        """Choose the requests to admit; None if the scheduler must decide."""
        decision, room = _Decision(), self._room()
        slots = self._scheduler.max_batch_requests - self._aside.size
        blocks, block_size, starved = self._blocks_to_give(), self._kv.block_size, self._scheduler.waiting.num_starved
        for simulated in self._queue():
            request, num_tokens = simulated.request, simulated.num_known
            needed = -(-num_tokens // block_size)
            if starved:
                if request is None or not request.starved:
                    return None  # a starved request behind it is admitted first
                if needed > blocks:
                    decision.least_missed, decision.reached_end = min(decision.least_missed, needed), False
                    break  # no request may pass this one
                starved -= 1
            if needed > blocks:
                decision.passed_over.append((simulated, len(decision.admitted)))
                decision.least_missed = min(decision.least_missed, needed)
                if len(decision.passed_over) >= MAX_PASSED_OVER:
                    decision.reached_end = False
                    break
                continue
            room -= num_tokens
            if room < 0:
                return None  # only a part of its prompt fits
            decision.admitted.append(simulated)
            decision.blocks += needed
            blocks -= needed + 1  # one is kept for its output
            if not room or len(decision.admitted) == slots:
                break
        return decision if self._may_be_passed_over(decision) else None

    def _admit_sharing(self) -> list[SimulatedRequest]:
        """With a prefix cache: admit all that find a slot, if it is certain that they fit. A request that shares what
        one of them is about to compute waits for it."""
        aside, waiting, index = self._aside, self._scheduler.waiting, self._kv.index
        admitted: list[SimulatedRequest] = []
        queue = self._all_that_fit()
        if not queue:
            return admitted
        aside.reserve()  # this may evict blocks that they would otherwise find
        any_waits = False
        for simulated in queue:
            if simulated.request is None:
                self._unsubmitted.popleft()
                if any_waits:  # the scheduler counts how often it is passed over
                    aside.scheduler.enter(simulated)
            match = index.find(simulated.request or simulated)
            if match.in_progress:
                any_waits = True
                if simulated.request is None:
                    aside.scheduler.enter(simulated)
                continue
            self._start(simulated, match)
            admitted.append(simulated)
            if any_waits and simulated.request is not None:
                waiting.count_passing(simulated.request, [])
        return admitted

    def _start(self, simulated: SimulatedRequest, match: PrefixMatch) -> None:
        aside, kv = self._aside, self._kv
        assert aside.lazy_indexing is not None
        if simulated.request is None and aside.lazy_indexing.admit(simulated, match):
            return
        request = simulated.request or aside.scheduler.enter(simulated)
        aside.scheduler.start(request)
        kv.attach(request, match)
        kv.claim(request)
        copies = kv.reserve(request, request.num_known - request.num_computed)
        assert copies == (), "no shared block is written"

    def _all_that_fit(self) -> list[SimulatedRequest]:
        """All waiting requests, or as many as there are slots, if the next step has room for all their tokens; else
        none."""
        waiting, slots = self._scheduler.waiting, self._scheduler.max_batch_requests - self._aside.size
        num_waiting = len(self._unsubmitted) + len(waiting)
        if not num_waiting or waiting.num_starved:
            return []
        room, blocks, block_size = self._room(), self._blocks_to_give(), self._kv.block_size
        first = list(islice(self._queue(), slots))
        for simulated in first:
            num_tokens = simulated.record.n_in
            if simulated.request is not None and simulated.request.generation:
                return []  # it ran before, and may find all but the last of its own tokens
            room -= num_tokens
            blocks -= -(-num_tokens // block_size)
            if room < 0 or blocks < 0:
                return []
            blocks -= 1  # one is kept for its output
        starts = {tuple(simulated.prompt[:block_size]) for simulated in first} if num_waiting > slots else ()
        return first if num_waiting <= slots or len(starts) == len(first) else []  # No two share their first block.

    def _room(self) -> int:
        """Prompt tokens that the next step has room for."""
        return min(self._limits.prefill_tokens, self._limits.tokens - self._aside.size)

    def _may_be_passed_over(self, decision: _Decision) -> bool:
        """Whether no request becomes starved by this."""
        if not decision.admitted or not decision.passed_over:
            return True
        most = self._scheduler.waiting.max_overtakes
        return all(
            len(decision.admitted) - before + (simulated.request.times_passed_over if simulated.request else 0) < most
            for simulated, before in decision.passed_over
        )

    def _blocks_to_give(self) -> int:
        """Free blocks, less those that running requests need for the step and one for each of them."""
        return self._kv.num_free - self._aside.blocks_for_next - self._aside.size

    def _queue(self) -> Iterator[SimulatedRequest]:
        """All waiting requests in the order of submission."""
        submitted = self._scheduler.waiting
        return chain(map(self._scheduler.find, submitted), self._unsubmitted) if submitted else iter(self._unsubmitted)

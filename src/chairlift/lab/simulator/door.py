"""The queue of a simulated engine, and who boards without the scheduler having to decide about it.

There is nothing to decide about newcomers when all who find a seat and blocks fit into the coming step with everything
they have to compute: they board, and at its end they are set aside like the others (`cruise.py`). Here that is worked
out as the scheduler would (`core/scheduler/admission.py`), for first come, first served; in other orders as long as
there is one newcomer at a time. With a prefix cache only if they fit even if nothing of theirs is found in it. In all
other cases the scheduler is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from chairlift.core.kv.prefix_index import PrefixMatch
from chairlift.core.scheduler.admission import MAX_PASSED_OVER
from chairlift.core.step_limits import NO_LIMIT, StepLimits
from chairlift.lab.simulator.cruise import Aside
from chairlift.lab.simulator.rider import Rider


@dataclass(slots=True)
class _Boarding:
    newcomers: list[Rider] = field(default_factory=list)
    passed_over: list[tuple[Rider, int]] = field(default_factory=list)  # and how many had boarded before
    blocks: int = 0  # that the newcomers take
    least_missed: int = NO_LIMIT  # blocks that would have been enough for one who got none
    asks_on: bool = True  # one more at the end of the queue would have been asked too


class Door:
    def __init__(self, aside: Aside, limits: StepLimits) -> None:
        self._aside = aside
        self._limits = limits
        self._scheduler = aside.scheduler
        self._kv = aside.scheduler.kv
        self._nobody_fits = False  # when they were last asked
        self._least_missed = 0  # then nobody boards with fewer blocks than this either, until the queue changes ...
        self._asks_on = False  # ... for which it is enough that one more comes
        self._line: deque[Rider] = deque()  # those the scheduler does not know: younger than all that it knows

    def add(self, rider: Rider) -> None:
        self._line.append(rider)
        if self._asks_on:
            self._least_missed = min(self._least_missed, self._kv.blocks_for(rider.record.n_in))

    def show_line(self) -> None:
        """Let the scheduler know of as many as it can ask in a step."""
        scheduler, self._least_missed = self._scheduler, 0
        seats = scheduler.max_batch_requests - len(scheduler.running) - self._aside.size
        enough = seats + MAX_PASSED_OVER + 1
        # It asks any number of those who wait for a prefix, and looks at all to find the one who comes first.
        if self._kv.prefix_caching or scheduler.ordering.has_claims:
            enough = len(scheduler.waiting) + len(self._line)
        while self._line and len(scheduler.waiting) < enough:
            self._aside.passengers.show(self._line.popleft())

    def stays_shut(self) -> bool:
        """Whether surely nobody boards before one of those set aside, who are alone on board, ends."""
        if not self._line and not self._scheduler.waiting:
            return True
        if self._aside.size >= self._scheduler.max_batch_requests:
            return True
        return self._nobody_fits  # and there are never more blocks until then

    def let_in(self) -> list[Rider]:
        """Those who board, if all of them can compute all they know in the coming step; else nobody, and the scheduler
        has to decide unless the door `stays_shut`."""
        scheduler, self._nobody_fits = self._scheduler, False
        if scheduler.running or scheduler.swap.num_slots or self._aside.size >= scheduler.max_batch_requests:
            return []
        if scheduler.ordering.has_claims and len(self._line) + len(scheduler.waiting) > 1:
            return []
        if self._kv.prefix_caching:
            return self._let_in_sharing()
        if self._blocks_to_give() < self._least_missed:
            self._nobody_fits = True
            return []
        boarding = self._decide()
        self._nobody_fits = boarding is not None and not boarding.newcomers
        self._least_missed = 0
        if boarding is None:
            return []
        if not boarding.newcomers:
            self._least_missed, self._asks_on = boarding.least_missed, boarding.asks_on
            return []
        for rider, before in boarding.passed_over:
            overtakers = len(boarding.newcomers) - before
            if overtakers:
                if rider.request is None:
                    self._line.remove(rider)
                (rider.request or self._aside.passengers.show(rider)).times_passed_over += overtakers
        for rider in boarding.newcomers:
            if rider.request is None:
                self._line.remove(rider)
            else:
                self._aside.passengers.seat(rider.request)
        self._kv.pool.lend(boarding.blocks)
        return boarding.newcomers

    def _decide(self) -> _Boarding | None:
        """Who boards in the coming step; None if that is the scheduler's business."""
        found, room = _Boarding(), self._room()
        seats = self._scheduler.max_batch_requests - self._aside.size
        blocks, block_size, starved = self._blocks_to_give(), self._kv.block_size, self._scheduler.waiting.num_starved
        for rider in self._queue():
            request = rider.request
            known = rider.record.n_in if request is None else request.num_known
            needed = -(-known // block_size)
            if starved:
                if request is None or not request.starved:
                    return None  # one behind it goes before it
                if needed > blocks:
                    found.least_missed, found.asks_on = min(found.least_missed, needed), False
                    break  # nobody goes before this one
                starved -= 1
            if needed > blocks:
                found.passed_over.append((rider, len(found.newcomers)))
                found.least_missed = min(found.least_missed, needed)
                if len(found.passed_over) >= MAX_PASSED_OVER:
                    found.asks_on = False
                    break
                continue
            room -= known
            if room < 0:
                return None  # it computes a part
            found.newcomers.append(rider)
            found.blocks += needed
            blocks -= needed + 1  # one is kept for its tokens to come
            if not room or len(found.newcomers) == seats:
                break
        return found if self._may_be_passed_over(found) else None

    def _let_in_sharing(self) -> list[Rider]:
        """With a prefix cache, all who find a seat, if it is certain that they fit. They may share what one of them is
        about to compute, and then wait for it."""
        aside, waiting, index = self._aside, self._scheduler.waiting, self._kv.index
        newcomers: list[Rider] = []
        queue = self._all_who_fit()
        if not queue:
            return newcomers
        aside.reserve()  # what they take may be evicted for it, and then is not found
        someone_waits = False
        for rider in queue:
            if rider.request is None:
                self._line.popleft()
                if someone_waits:  # the scheduler counts how often he is overtaken
                    aside.passengers.show(rider)
            match = index.find(rider.request or rider)
            if match.coming:
                someone_waits = True
                if rider.request is None:
                    aside.passengers.show(rider)
                continue
            self._seat(rider, match)
            newcomers.append(rider)
            if someone_waits and rider.request is not None:
                waiting.count_passing(rider.request, [])
        return newcomers

    def _seat(self, rider: Rider, match: PrefixMatch) -> None:
        aside, kv = self._aside, self._kv
        assert aside.late_index is not None
        if rider.request is None and aside.late_index.board(rider, match):
            return
        request = rider.request or aside.passengers.show(rider)
        aside.passengers.seat(request)
        kv.attach(request, match)
        copies = kv.reserve(request, request.num_known - request.num_computed)
        assert copies == (), "nothing that is shared is written to"

    def _all_who_fit(self) -> list[Rider]:
        """Everyone who waits, or as many as there are seats: if all of them can board, unless they have to wait for one
        of the others, and compute all they know. Else nobody."""
        waiting, seats = self._scheduler.waiting, self._scheduler.max_batch_requests - self._aside.size
        num_waiting = len(self._line) + len(waiting)
        if not num_waiting or waiting.num_starved:
            return []
        room, blocks, block_size = self._room(), self._blocks_to_give(), self._kv.block_size
        found = list(islice(self._queue(), seats))
        for rider in found:
            known = rider.record.n_in
            if rider.request is not None and rider.request.generation:
                return []  # it was on board before, and may find all but the last of its own tokens
            room -= known
            blocks -= -(-known // block_size)
            if room < 0 or blocks < 0:
                return []
            blocks -= 1  # one is kept for its tokens to come
        return found if num_waiting <= seats or self._share_nothing(found) else []

    def _share_nothing(self, riders: list[Rider]) -> bool:
        """With each other."""
        size = self._kv.block_size
        return len({tuple(rider.prompt[:size]) for rider in riders}) == len(riders)

    def _room(self) -> int:
        """The most prompt tokens of the coming step."""
        return min(self._limits.prefill_tokens, self._limits.tokens - self._aside.size)

    def _may_be_passed_over(self, boarding: _Boarding) -> bool:
        """Whether nobody is overtaken who may not be, now or after this."""
        if not boarding.newcomers or not boarding.passed_over:
            return True
        most = self._scheduler.waiting.max_overtakes
        return all(
            len(boarding.newcomers) - before + (rider.request.times_passed_over if rider.request else 0) < most
            for rider, before in boarding.passed_over
        )

    def _blocks_to_give(self) -> int:
        """What those on board leave to newcomers: they take what they need for the step, and one is kept for each."""
        return self._kv.num_free - self._aside.blocks_for_next - self._aside.size

    def _queue(self) -> Iterator[Rider]:
        """Everyone who waits, in the order of submission."""
        shown = self._scheduler.waiting
        return chain(map(self._aside.passengers.rider, shown), self._line) if shown else iter(self._line)

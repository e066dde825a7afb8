"""Requests that do nothing but decode, kept out of the scheduler's way.

Of a hundred requests on board, ninety-nine usually get their one token in a step, as in the step before, and there is
nothing to decide about them: not before one ends or memory runs out. A simulation that asks the scheduler about each
of them in every step spends all its time there. So they are set aside: the scheduler only knows how many they are
(`SchedulerState.aside`) and how many blocks they have taken (`BlockPool.lend`), and all else is worked out
when someone looks.

Which blocks they hold does not matter, only how many, and when. That is known exactly: each of them takes one every
`block_size` steps, so it is enough to count how many do so in which of these steps (`_takers`).
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush

from chairlift.core.kv.prefix_index import Miss, PrefixMatch
from chairlift.core.request import Ending, FinishReason
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.lab.simulator.late_index import LateIndex
from chairlift.lab.simulator.rider import Passengers, Rider, token_of

_NOTHING_SHARED = PrefixMatch((), Miss.DISABLED)
_ALL_GENERATED = Ending(FinishReason.LENGTH)


class Aside:
    """Those of a scheduler's requests on board that are kept here for now."""

    def __init__(self, scheduler: Scheduler, passengers: Passengers) -> None:
        self.scheduler = scheduler
        self.passengers = passengers
        self.size = 0
        self.context = 0  # known tokens of all of them: what a decode of each would read
        self._state = scheduler.state
        self._kv = scheduler.kv
        self._pool = scheduler.kv.pool
        self._block_size = scheduler.kv.block_size
        self._steps = 0  # that any of them have taken since the beginning
        self._ends: list[tuple[int, int, Rider]] = []  # (its last step, order, rider): a heap
        self._takers = [0] * self._block_size  # who takes a block in step s, at s % block_size
        self._next_is_lent = False  # the blocks that they take in the next step
        self.late_index = LateIndex(scheduler, passengers) if scheduler.kv.prefix_caching else None

    @property
    def steps_to_next_end(self) -> int:
        """The first of them ends with so many steps."""
        return self._ends[0][0] - self._steps

    def take(self) -> None:
        """Set aside all who decode."""
        state, staying = self.scheduler.state, []
        for request in state.running:
            if request.decoding and not request.steps_in_flight:
                self._add(self.passengers.rider(request), request.num_known)
            else:
                staying.append(request)
        state.running = staying

    def _add(self, rider: Rider, known: int) -> None:
        """All of its `known` tokens but the last are computed."""
        rider.since, rider.known = self._steps, known
        self.size += 1
        self._state.aside = self.size
        self.context += known
        self._takers[(self._steps + 2 - known) % self._block_size] += 1
        last = self._steps + rider.record.n_in + rider.record.n_out - known
        heappush(self._ends, (last, rider.order, rider))

    def advance(self, count: int, now: float) -> None:
        """One more token for each, `count` times, and the end of those who then have all of theirs."""
        self.reserve(count)
        self._next_is_lent = False
        self._steps += count
        self.context += count * self.size
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            rider = heappop(ends)[2]
            computed = rider.known - 1 + self._remove(rider)
            self._end(rider, computed, now)

    def _end(self, rider: Rider, num_computed: int, now: float) -> None:
        """It has got all its tokens. Its blocks stay, until others need them or for a while."""
        request = rider.request
        if request is None:
            if self.late_index is not None:
                self.late_index.end(rider, num_computed)
            self.passengers.end(rider, now)
            return
        if self._kv.prefix_caching or self.scheduler.policy.keeps_slots:
            self._kv.leave_behind(request, num_computed)
        self.scheduler.state.running.append(request)
        self.scheduler.finish(request.id, _ALL_GENERATED, now)

    def give_back(self) -> None:
        """The scheduler is to decide about all of them again."""
        if self._next_is_lent:
            self._pool.lend(-self.takers_of(1))
            self._next_is_lent = False
        for _, _, rider in self._ends:
            self._return(rider)
        self._ends.clear()

    def _return(self, rider: Rider) -> None:
        """Back to the scheduler, with all the blocks and tokens it should have by now."""
        if rider.request is None and self.late_index is not None:
            self.late_index.introduce(rider)
        computed = rider.known - 1 + self._remove(rider)
        request = rider.request or self.passengers.show_on_board(rider)
        if not self._kv.table(request):
            self._kv.attach(request, _NOTHING_SHARED)
        copies = self._kv.reserve(request, computed - request.num_planned)
        assert copies is not None, "they are the blocks that it was lent"
        request.extend([token_of(request)] * (computed + 1 - request.num_known))
        request.start_from(computed)
        self._kv.commit(request)
        self.scheduler.ordering.appended(request)
        insort(self.scheduler.state.running, request, key=lambda other: other.order)

    def _remove(self, rider: Rider) -> int:
        """Returns how many steps it has taken part in. The blocks that it was lent for them are empty again."""
        taken = self._steps - rider.since
        self.size -= 1
        self._state.aside = self.size
        self.context -= rider.known + taken
        self._takers[(rider.since + 2 - rider.known) % self._block_size] -= 1
        self._pool.lend(self._num_held(rider) - self._kv.blocks_for(rider.known - 1 + taken))
        return taken

    def _num_held(self, rider: Rider) -> int:
        """Blocks that the scheduler knows it to have."""
        return len(rider.shared if rider.request is None else self._kv.table(rider.request))

    def welcome(self, newcomers: list[Rider], now: float) -> None:
        """The step in which these have boarded is over: each has got a token, and decodes from now on. Those that the
        scheduler does not know hold no blocks, but were lent as many as they need for what they knew."""
        for rider in newcomers:
            record, known = rider.record, rider.num_known
            if record.first_token is None:
                record.first_token = now
            if self._kv.prefix_caching and rider.request is not None:
                rider.request.start_from(known)
                self._kv.commit(rider.request)
            if record.n_in + record.n_out > known + 1:
                self._add(rider, known + 1)
            else:
                self._pool.lend(self._num_held(rider) - self._kv.blocks_for(known))
                self._end(rider, known, now)

    # ---- memory -------------------------------------------------------------------------------------------------

    def reserve(self, steps: int = 1) -> None:
        """Count the blocks that they take in the coming steps as used. Those of the next step may be already."""
        if self._next_is_lent and steps == 1:
            return
        self._pool.lend(self.takers_of(steps) - (self.takers_of(1) if self._next_is_lent else 0))
        self._next_is_lent = self.size > 0

    @property
    def blocks_for_next(self) -> int:
        """That they have yet to take for the next step."""
        return 0 if self._next_is_lent else self.takers_of(1)

    def takers_of(self, steps: int) -> int:
        """How many blocks they take in so many coming steps."""
        size, first = self._block_size, self._steps + 1
        if steps == 1:
            return self._takers[first % size]
        rounds, rest = divmod(steps, size)
        blocks = rounds * self.size
        for step in range(first, first + rest):
            blocks += self._takers[step % size]
        return blocks

    def steps_with_room(self) -> int:
        """For so many coming steps there are blocks."""
        rounds, left = divmod(self._pool.num_free, self.size)
        steps = rounds * self._block_size
        for step in range(self._steps + 1, self._steps + 1 + self._block_size):
            left -= self._takers[step % self._block_size]
            if left < 0:
                break
            steps += 1
        return steps

    def leaves_room(self) -> bool:
        """Whether in the next step everyone who is on board gets the blocks he needs."""
        needed = self.blocks_for_next + sum(self._kv.num_missing(request) for request in self.scheduler.running)
        return needed <= self._pool.num_free

"""Requests that only decode, kept outside of the scheduler, and their prompts, kept out of the prefix index.

Most running requests get one token in each step, and the scheduler has nothing to decide about them before one ends or
memory runs out. Passing each of them through the scheduler in every step would take most of the time of a simulation.
So they are set aside: the scheduler has only their number (`SimulatedState.num_aside`) and the number of their blocks
(`CountingBlockPool.count_used`); all else is computed on demand.

Only the number of their blocks matters. Each request takes one every `block_size` steps, so it is enough to count how
many requests do so in which of these steps (`_takers`).

Indexing a prompt hashes each of its blocks, and evicting it takes as long, but most prompts are never looked up again.
So a prompt is registered only by its first block that no other prompt has (`defer`), and is indexed when another prompt
with the same block is looked up. Until then only the number of its blocks is needed and, once it has ended, their
position in the eviction order.
"""

from __future__ import annotations

from bisect import insort
from functools import partial
from heapq import heapify, heappop, heappush

from chairlift.core.kv.prefix_index import Miss, PrefixMatch
from chairlift.core.request import Ending, FinishReason, Request
from chairlift_lab.simulator.scheduler import SimulatedRequest, SimulatedScheduler, token_of

_NOTHING_SHARED = PrefixMatch((), Miss.DISABLED)
_ALL_GENERATED = Ending(FinishReason.LENGTH)


class LazyIndexing:
    """Defers the indexing of requests that were not submitted to the scheduler."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._pool = scheduler.kv.pool
        self._index = scheduler.kv.index

    def admit(self, simulated: SimulatedRequest, match: PrefixMatch) -> bool:
        """Count the blocks for the prompt of a request that is not submitted; False (and no change) if another request
        has the same next block."""
        shared = len(match.blocks)
        if shared < self._num_full(simulated):
            first = self._index.digest(simulated, shared)
            if self._index.has(first):
                return False
            self._index.defer(first, partial(self.index_now, simulated))
        simulated.shared, simulated.num_found = match.blocks, shared * self._kv.block_size
        self._pool.share(match.blocks)
        self._pool.count_used(self._kv.blocks_for(simulated.record.n_in) - shared)
        return True

    def end(self, simulated: SimulatedRequest, num_computed: int) -> None:
        """Keep its full blocks in the cache, including those with generated tokens. They are no longer counted as
        used."""
        shared = len(simulated.shared)
        left = num_computed // self._kv.block_size - shared
        if left:
            deferred = shared < self._num_full(simulated)
            forget = partial(self._index.cancel, simulated.block_digests[shared]) if deferred else None
            simulated.group = self._pool.add_cached_group(left, forget)
        self._pool.release(reversed(simulated.shared))

    def index_now(self, simulated: SimulatedRequest) -> None:
        """Index its prompt, or submit it to the scheduler if it is still running."""
        own = self._num_full(simulated) - len(simulated.shared)
        if own > 0:
            self._index.cancel(simulated.block_digests[len(simulated.shared)])
        if simulated.group is not None:
            blocks = self._pool.name(simulated.group, min(own, simulated.group.num_anonymous))
            inserted = self._index.insert(simulated, len(simulated.shared), blocks)
            assert inserted == blocks, "the blocks are indexed already"
            return
        request = self._submit_running(simulated)
        if simulated.length:  # else its prompt is computed in the current step
            request.start_from(simulated.record.n_in)
            self._kv.commit(request)

    def _submit_running(self, simulated: SimulatedRequest) -> Request:
        num_tokens = simulated.record.n_in
        request = self._scheduler.enter_running(simulated)
        self._pool.count_used(len(simulated.shared) - self._kv.blocks_for(num_tokens))
        self._kv.attach(request, PrefixMatch(tuple(simulated.shared), None))
        self._kv.claim(request)
        self._pool.release(simulated.shared)
        copies = self._kv.reserve(request, num_tokens - request.num_computed)
        assert copies == (), "its blocks were counted as used"
        return request

    def _num_full(self, simulated: SimulatedRequest) -> int:
        """Blocks that its prompt fills."""
        return simulated.record.n_in // self._kv.block_size


class SteadyDecodes:
    """The running requests of a scheduler that are set aside."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self.scheduler = scheduler
        self.size = 0
        self.context = 0  # known tokens of all of them: positions that a decode of each reads
        self._state = scheduler.state
        self._kv = scheduler.kv
        self._pool = scheduler.kv.pool
        self._block_size = scheduler.kv.block_size
        self._steps = 0  # taken since the beginning
        self._ends: list[tuple[int, int, SimulatedRequest]] = []  # (last step, order, request): a heap
        self._takers = [0] * self._block_size  # requests that take a block in step s, at s % block_size
        self._next_is_counted = False  # whether the blocks of the next step are counted already
        self.lazy_indexing = LazyIndexing(scheduler) if scheduler.kv.prefix_caching else None

    @property
    def steps_to_next_end(self) -> int:
        """Steps until the first of them ends."""
        return self._ends[0][0] - self._steps

    def take(self) -> None:
        """Set aside all decoding requests."""
        state, staying = self.scheduler.state, []
        for request in state.running:
            if request.decoding and not request.steps_in_flight:
                self._add(self.scheduler.find(request), request.num_known)
            else:
                staying.append(request)
        state.running = staying

    def _add(self, simulated: SimulatedRequest, length: int) -> None:
        """Set aside a request whose `length` tokens are computed but for the last."""
        simulated.since, simulated.length = self._steps, length
        self.size += 1
        self._state.num_aside = self.size
        self.context += length
        self._takers[(self._steps + 2 - length) % self._block_size] += 1
        last = self._steps + simulated.record.n_in + simulated.record.n_out - length
        heappush(self._ends, (last, simulated.order, simulated))

    def advance(self, count: int, now: float) -> None:
        """Take `count` steps of one token for each request, and end those that have all their tokens then."""
        self.reserve(count)
        self._next_is_counted = False
        self._steps += count
        self.context += count * self.size
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            simulated = heappop(ends)[2]
            computed = simulated.length - 1 + self._remove(simulated)
            self._end(simulated, computed, now)

    def _end(self, simulated: SimulatedRequest, num_computed: int, now: float) -> None:
        """End a request that has all its tokens; its full blocks stay in the prefix cache."""
        request = simulated.request
        if request is None:
            if self.lazy_indexing is not None:
                self.lazy_indexing.end(simulated, num_computed)
            self.scheduler.end(simulated, now)
            return
        if self._state.lengths is not None:  # They learn how many tokens it has.
            request.extend([token_of(request)] * (simulated.record.n_out - request.num_output))
        if self._kv.prefix_caching or self.scheduler.policy.keeps_slots:
            self._kv.leave_blocks(request, num_computed)
        self.scheduler.state.running.append(request)
        self.scheduler.finish(request.id, _ALL_GENERATED, now)

    def give_back(self) -> None:
        """Return all requests to the scheduler."""
        self._uncount_next()
        for _, _, simulated in self._ends:
            self._return(simulated)
        self._ends.clear()

    def preempt_latest(self, now: float) -> bool:
        """Preempt as many requests, the latest first, as the others need blocks for the next step. False (and no
        change) if that is for the scheduler to decide."""
        scheduler = self.scheduler
        if scheduler.running or scheduler.swap.num_slots or scheduler.idle or scheduler.ordering.has_claims:
            return False
        self._uncount_next()
        counted = 0
        while self.takers_of(1) > counted + self._pool.num_free:
            counted += self._pool.num_free  # Those before the victim take what is free.
            self._pool.count_used(self._pool.num_free)
            last = max(range(len(self._ends)), key=lambda index: _rank(self._ends[index][2]))
            simulated = self._ends.pop(last)[2]
            self._return(simulated)
            assert simulated.request is not None
            self._state.preempt(simulated.request, now)
        heapify(self._ends)
        self._pool.count_used(self.takers_of(1) - counted)
        self._next_is_counted = self.size > 0
        return True

    def _uncount_next(self) -> None:
        if self._next_is_counted:
            self._pool.count_used(-self.takers_of(1))
            self._next_is_counted = False

    def _return(self, simulated: SimulatedRequest) -> None:
        """Return a request to the scheduler with all the blocks and tokens it should have by now."""
        if simulated.request is None and self.lazy_indexing is not None:
            self.lazy_indexing.index_now(simulated)
        computed = simulated.length - 1 + self._remove(simulated)
        request = simulated.request or self.scheduler.enter_running(simulated)
        if not self._kv.table(request):
            self._kv.attach(request, _NOTHING_SHARED)
            self._kv.claim(request)
        copies = self._kv.reserve(request, computed - request.num_planned)
        assert copies is not None, "its blocks were counted as used"
        request.extend([token_of(request)] * (computed + 1 - request.num_known))
        request.start_from(computed)
        self._kv.commit(request)
        self.scheduler.ordering.appended(request)
        insort(self.scheduler.state.running, request, key=lambda other: other.order)

    def _remove(self, simulated: SimulatedRequest) -> int:
        """Stop counting its blocks as used; return the number of steps since it was set aside."""
        taken = self._steps - simulated.since
        self.size -= 1
        self._state.num_aside = self.size
        self.context -= simulated.length + taken
        self._takers[(simulated.since + 2 - simulated.length) % self._block_size] -= 1
        self._pool.count_used(self._num_held(simulated) - self._kv.blocks_for(simulated.length - 1 + taken))
        return taken

    def _num_held(self, simulated: SimulatedRequest) -> int:
        """Blocks that are in its table."""
        return len(simulated.shared if simulated.request is None else self._kv.table(simulated.request))

    def add_admitted(self, admitted: list[SimulatedRequest], now: float) -> None:
        """Set aside requests after the step that computed their prompts and first tokens. The blocks of those that were
        not submitted to the scheduler are only counted."""
        for simulated in admitted:
            record, known = simulated.record, simulated.num_known
            if record.first_token is None:
                record.cached = simulated.num_computed
                self.scheduler.start_output(record, now)
            if self._kv.prefix_caching and simulated.request is not None:
                simulated.request.start_from(known)
                self._kv.commit(simulated.request)
            if record.n_in + record.n_out > known + 1:
                self._add(simulated, known + 1)
            else:
                self._pool.count_used(self._num_held(simulated) - self._kv.blocks_for(known))
                self._end(simulated, known, now)

    # ---- memory -------------------------------------------------------------------------------------------------

    def reserve(self, steps: int = 1) -> None:
        """Count the blocks of the next `steps` steps as used, unless those of the next step are already."""
        if self._next_is_counted and steps == 1:
            return
        self._pool.count_used(self.takers_of(steps) - (self.takers_of(1) if self._next_is_counted else 0))
        self._next_is_counted = self.size > 0

    @property
    def blocks_for_next(self) -> int:
        """Blocks of the next step that are not counted yet."""
        return 0 if self._next_is_counted else self.takers_of(1)

    def takers_of(self, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        size, first = self._block_size, self._steps + 1
        if steps == 1:
            return self._takers[first % size]
        rounds, rest = divmod(steps, size)
        blocks = rounds * self.size
        for step in range(first, first + rest):
            blocks += self._takers[step % size]
        return blocks

    def steps_with_room(self) -> int:
        """The number of steps that the free blocks suffice for."""
        rounds, left = divmod(self._pool.num_free, self.size)
        steps = rounds * self._block_size
        for step in range(self._steps + 1, self._steps + 1 + self._block_size):
            left -= self._takers[step % self._block_size]
            if left < 0:
                break
            steps += 1
        return steps

    def leaves_room(self) -> bool:
        """Whether every running request gets the blocks it needs for the next step."""
        needed = self.blocks_for_next + sum(self._kv.need(request) for request in self.scheduler.running)
        return needed <= self._pool.num_free


def _rank(simulated: SimulatedRequest) -> tuple[bool, int]:
    """As `Ordering.rank` for first come, first served."""
    return simulated.request is None or not simulated.request.starved, simulated.order

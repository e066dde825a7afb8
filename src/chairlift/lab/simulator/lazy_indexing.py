"""Prompts that are not in the prefix index yet, since no other prompt shares them.

To index a prompt is to hash each of its blocks, and to evict it later takes as long. Most are never looked up again. So
a prompt that continues differently from all others is registered by its first block that no other has (`defer`); the
whole of it is indexed only when another prompt continues in the same way. Until then it is enough to know how many
blocks it holds and, once it has ended, where they are in the eviction order.
"""

from __future__ import annotations

from functools import partial

from chairlift.core.kv.prefix_index import PrefixMatch
from chairlift.core.request import Request
from chairlift.lab.simulator.scheduler import SimulatedScheduler
from chairlift.lab.simulator.simulated_request import ShownRequests, SimulatedRequest


class LazyIndexing:
    """Keeps the prompts of requests that the scheduler has not been shown out of the prefix index."""

    def __init__(self, scheduler: SimulatedScheduler, shown: ShownRequests) -> None:
        self._scheduler = scheduler
        self._shown = shown
        self._kv = scheduler.kv
        self._pool = scheduler.kv.pool
        self._index = scheduler.kv.index

    def admit(self, simulated: SimulatedRequest, match: PrefixMatch) -> bool:
        """Give a request that is not shown the blocks for its prompt. False (and no change) if the index has all of
        the prompt, and must decide which blocks are kept."""
        shared = len(match.blocks)
        if shared < self._num_full(simulated):
            first = self._index.digest(simulated, shared)
            if self._index.has(first):
                return False
            self._index.defer(first, partial(self.index_now, simulated))
        simulated.shared, simulated.num_found = match.blocks, shared * self._kv.block_size
        self._pool.share(match.blocks)
        self._pool.lend(self._kv.blocks_for(simulated.record.n_in) - shared)
        return True

    def end(self, simulated: SimulatedRequest, num_computed: int) -> None:
        """Leave its full blocks in the cache, those with generated tokens too, which no prompt shares. The blocks that
        it was lent are returned already."""
        shared = len(simulated.shared)
        left = num_computed // self._kv.block_size - shared
        if left:
            deferred = shared < self._num_full(simulated)
            forget = partial(self._index.cancel, simulated.block_digests[shared]) if deferred else None
            simulated.pile = self._pool.leave_pile(left, forget)
        self._pool.release(reversed(simulated.shared))

    def index_now(self, simulated: SimulatedRequest) -> None:
        """Index its prompt after all, or show it to the scheduler: what would have been done when it arrived."""
        own = self._num_full(simulated) - len(simulated.shared)
        if own > 0:
            self._index.cancel(simulated.block_digests[len(simulated.shared)])
        if simulated.pile is not None:
            blocks = self._pool.name(simulated.pile, min(own, simulated.pile.num_nameless))
            inserted = self._index.insert(simulated, len(simulated.shared), blocks)
            assert inserted == blocks, "no other prompt had them"
            return
        request = self._show_running(simulated)
        if simulated.known:  # else its prompt is computed in the current step
            request.start_from(simulated.record.n_in)
            self._kv.commit(request)

    def _show_running(self, simulated: SimulatedRequest) -> Request:
        num_tokens = simulated.record.n_in
        request = self._shown.show_running(simulated)
        self._pool.lend(len(simulated.shared) - self._kv.blocks_for(num_tokens))
        self._kv.attach(request, PrefixMatch(tuple(simulated.shared), None))
        self._pool.release(simulated.shared)
        copies = self._kv.reserve(request, num_tokens - request.num_computed)
        assert copies == (), "they are the blocks that it was lent"
        return request

    def _num_full(self, simulated: SimulatedRequest) -> int:
        """Blocks that its prompt fills."""
        return simulated.record.n_in // self._kv.block_size

"""Keeps prompts out of the prefix index until another prompt shares them.

Indexing a prompt hashes each of its blocks, and evicting it takes as long, but most prompts are never looked up again.
So a prompt is registered only by its first block that no other prompt has (`defer`), and is indexed when another prompt
with the same block is looked up. Until then only the number of its blocks is needed and, once it has ended, their
position in the eviction order.
"""

from __future__ import annotations

from functools import partial

from chairlift.core.kv.prefix_index import PrefixMatch
from chairlift.core.request import Request
from chairlift_lab.simulator.scheduler import SimulatedScheduler
from chairlift_lab.simulator.simulated_request import SimulatedRequest, SubmittedRequests


class LazyIndexing:
    """Defers the indexing of requests that were not submitted to the scheduler."""

    def __init__(self, scheduler: SimulatedScheduler, submitted: SubmittedRequests) -> None:
        self._scheduler = scheduler
        self._submitted = submitted
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
        if simulated.known:  # else its prompt is computed in the current step
            request.start_from(simulated.record.n_in)
            self._kv.commit(request)

    def _submit_running(self, simulated: SimulatedRequest) -> Request:
        num_tokens = simulated.record.n_in
        request = self._submitted.submit_running(simulated)
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

"""Prompts that are not in the prefix index yet, since nobody has come who could share them.

To index a prompt is to hash each of its blocks, and to evict it later takes as long. Most are never asked for again. So
a prompt that goes on differently from all others is indexed by its first block that nobody else has (`put_off`): only
when another comes that goes on in the same way, the whole of it is. Until then it is enough to know how many blocks it
holds, and when it has ended, where they are in the line for eviction.
"""

from __future__ import annotations

from functools import partial

from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import PrefixMatch
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.lab.simulator.rider import Passengers, Rider


class LateIndex:
    def __init__(self, scheduler: Scheduler, passengers: Passengers) -> None:
        self._scheduler = scheduler
        self._passengers = passengers
        self._kv: KVCache = scheduler.kv
        self._pool = scheduler.kv.pool
        self._index = scheduler.kv.index

    def board(self, rider: Rider, match: PrefixMatch) -> bool:
        """Give `rider`, whom the scheduler does not know, what it needs for its prompt. False (and no change) if others
        have all of it, so that it is for the index to say whose blocks are kept."""
        shared = len(match.blocks)
        if shared < self._num_full(rider):
            first = self._index.digest(rider, shared)
            if self._index.knows(first):
                return False
            self._index.put_off(first, partial(self.introduce, rider))
        rider.shared, rider.num_found = match.blocks, shared * self._kv.block_size
        self._pool.share(match.blocks)
        self._pool.lend(self._kv.blocks_for(rider.record.n_in) - shared)
        return True

    def end(self, rider: Rider, num_computed: int) -> None:
        """It leaves its full blocks in the cache, those with generated tokens too, which nobody will ask for. What it
        was lent is back already."""
        shared = len(rider.shared)
        left = num_computed // self._kv.block_size - shared
        if left:
            put_off = shared < self._num_full(rider)
            forget = partial(self._index.take_back, rider.block_digests[shared]) if put_off else None
            rider.pile = self._pool.leave_pile(left, forget)
        self._pool.release(reversed(rider.shared))

    def introduce(self, rider: Rider) -> None:
        """Index its prompt after all, or let the scheduler know it: what it would have done when the rider came."""
        own = self._num_full(rider) - len(rider.shared)
        if own > 0:
            self._index.take_back(rider.block_digests[len(rider.shared)])
        if rider.pile is not None:
            blocks = self._pool.name(rider.pile, min(own, rider.pile.num_nameless))
            inserted = self._index.insert(rider, len(rider.shared), blocks)
            assert inserted == blocks, "nobody else had them"
            return
        request = self._show_on_board(rider)
        if rider.known:  # else its prompt is being computed right now
            request.start_from(rider.record.n_in)
            self._kv.commit(request)

    def _show_on_board(self, rider: Rider) -> Request:
        num_tokens = rider.record.n_in
        request = self._passengers.show_on_board(rider)
        self._pool.lend(len(rider.shared) - self._kv.blocks_for(num_tokens))
        self._kv.attach(request, PrefixMatch(tuple(rider.shared), None))
        self._pool.release(rider.shared)
        copies = self._kv.reserve(request, num_tokens - request.num_computed)
        assert copies == (), "they are the blocks that it was lent"
        return request

    def _num_full(self, rider: Rider) -> int:
        """Blocks that its prompt fills."""
        return rider.record.n_in // self._kv.block_size

"""KV accounting: which request holds which blocks. The tensors belong to the runner.

This works like virtual memory. The tokens of a request are logically contiguous; its block table maps each run of
`block_size` tokens to a physical block anywhere in the pool, and several tables may contain the same block.

    tokens      0 ........ 15 | 16 ....... 31 | 32 .. 37
    table            7        |       2       |    9          block 9 has 10 slots left
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.core.kv.block_pool import BlockPool, Resource
from chairlift.core.kv.loads import ComputeSeconds, Loads
from chairlift.core.kv.prefix_index import Miss, PrefixIndex, PrefixMatch
from chairlift.core.kv.state_slots import StateSlots
from chairlift.core.kv.tiers import KEYS_AND_VALUES, PartKey, Tiers
from chairlift.core.plan import BlockCopy
from chairlift.core.request import Request

Place = tuple[int, int]
"""Which table a block is in, and its position there."""


@dataclass(frozen=True, slots=True)
class KVChanges:
    """The changes since the last call of `KVCache.take_changes`."""

    blocks: list[int]  # blocks whose state may have changed, in order
    rewritten: set[str]  # ids of requests whose tables changed other than at their end


class KVCache(Resource):
    """The block tables of all requests, over one pool and one prefix index."""

    states: StateSlots | None = None  # Only a `HybridCache` has them.
    tiers: Tiers | None = None  # They keep what the device has evicted.
    loads: Loads | None = None  # The parts on their way from there.
    tiers_obstacle = ""  # why it cannot have tiers, in words

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True, pool: BlockPool | None = None
    ) -> None:
        """`pool`: one that other caches share, in place of `num_blocks` of its own."""
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(block_size)
        self.pool = BlockPool(num_blocks, on_evict=self._evicted) if pool is None else pool
        self._tables: dict[str, list[int]] = {}
        self._num_indexed: dict[str, int] = {}  # number of a table's first blocks that are indexed
        self._rewritten: set[str] | None = None  # see `KVChanges`; None while changes are not tracked

    def use_tiers(self, tiers: Tiers, compute_seconds: ComputeSeconds) -> None:
        """Keep full blocks in `tiers` and load them from there where computing would take longer; called once, before
        the first request."""
        self.tiers, self.loads = tiers, Loads(self, tiers, compute_seconds)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What a request must have to run."""
        return (self,)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def _evicted(self, blocks: Sequence[int]) -> None:
        self.index.remove(blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> Sequence[int]:
        return self._tables.get(request.id, ())

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(table) for request_id, table in self._tables.items()}

    def tables_beside(self, request: Request) -> tuple[Sequence[int], ...]:
        """The block tables of `request` for layers that have another one; see `GroupedCache`."""
        return ()

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The tables of one request: that of each is kept by one of these."""
        return (self,)

    def first_held(self, request: Request) -> int:
        """The position in the table from which on `request` holds the blocks."""
        return 0

    def held(self, request: Request) -> Sequence[int]:
        """The blocks that `request` holds a reference to."""
        return self.table(request)

    def all_held(self) -> dict[str, tuple[int, ...]]:
        """The same of all requests."""
        return self.tables()

    def most_held(self, num_shared: int, num_own: int, beams: int = 1) -> int:
        """The most blocks that `beams` sequences hold together, of which each has `num_own` blocks of tokens of its own
        behind `num_shared` that they share."""
        return num_shared + beams * num_own

    def room_behind(self, num_shared: int, beams: int = 1) -> int:
        """The most blocks of its own that each of `beams` sequences can have behind `num_shared` that they share."""
        return (self.num_blocks - num_shared) // beams

    def match(self, request: Request) -> PrefixMatch:
        """Find the cached blocks that `request` can start with."""
        if not self.prefix_caching:
            return PrefixMatch((), Miss.DISABLED)
        if request.needs_whole_prompt:
            return PrefixMatch((), Miss.WHOLE_PROMPT)
        return self.index.find(request)

    def tokens_at_hand(self, request: Request) -> int:
        """Tokens that `request` need not compute: those that are computed, or at least as many as are cached."""
        if request.num_computed or not self.prefix_caching or request.needs_whole_prompt:
            return request.num_computed
        return self.index.num_cached(request) * self.block_size

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Start the table of `request` with the blocks of `match`; their tokens count as computed."""
        assert request.id not in self._tables
        self.pool.share(match.blocks)
        self._tables[request.id] = list(match.blocks)
        self._num_indexed[request.id] = len(match.blocks)
        if self.tiers is not None:
            self.tiers.touch(reversed(request.block_digests[: len(match.blocks)]))
        request.start_from(len(match.blocks) * self.block_size)

    def claim(self, request: Request) -> None:
        """Announce the blocks that `request` will compute; requests with the same prefix then wait for them."""
        if self.prefix_caching:
            self.index.claim(request, self.first_held(request))

    def can_fork(self, parent: Request, num_tokens: int) -> bool:
        """Whether `parent` still holds what a request that starts after its first `num_tokens` tokens needs."""
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Start the table of `child` with the blocks of the first `num_tokens` tokens of `parent`. The last one may be
        partly filled: the first write into a shared block copies it (see `reserve`)."""
        assert child.id not in self._tables
        assert parent.num_computed >= num_tokens
        shared = self._tables[parent.id][: self.blocks_for(num_tokens)]
        self.pool.share(shared)
        self._tables[child.id] = list(shared)
        self._num_indexed[child.id] = num_tokens // self.block_size
        child.start_from(num_tokens)
        if self._rewritten is not None:
            self._rewritten.add(child.id)  # A beam may have had a different table before.

    def needed(self, request: Request) -> range:
        """The positions in the table of the computed blocks that further tokens of `request` see."""
        return range(self.blocks_for(request.num_computed))

    def computed(self, request: Request) -> dict[Place, int]:
        """The computed blocks that further tokens of `request` see."""
        table = self._tables[request.id]
        return {(0, position): table[position] for position in self.needed(request)}

    def restore(self, request: Request) -> dict[Place, int] | None:
        """Allocate the blocks of computed tokens that are in host memory; None (and no change) if memory is short."""
        missing = self._missing(request)
        blocks = self.pool.take(len(missing))
        if blocks is None:
            return None
        self._tables[request.id] += blocks
        return {(0, position): block for position, block in zip(missing, blocks, strict=True)}

    def num_to_restore(self, request: Request) -> int:
        """The blocks that `restore` would allocate."""
        return len(self._missing(request))

    def _missing(self, request: Request) -> range:
        """The needed positions that are behind the table of `request`."""
        return range(len(self._tables[request.id]), self.needed(request).stop)

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        """Allocate blocks for the next `count` tokens of `request`, which it alone may write to.

        Returns the copies to make before writing, or None (and no change of the table) if memory is short.
        """
        table = self._tables[request.id]
        planned, room = request.num_planned, len(table) * self.block_size
        if room - self.block_size <= planned <= room - count and self.pool.is_private(table[-1]):
            return ()  # Most decodes: the last block has room.
        frozen = self._frozen(request)
        num_new = self.blocks_for(planned + count) - len(table)
        blocks = self.pool.take(len(frozen) + max(num_new, 0))
        if blocks is None:
            return None
        copies = []
        for position in frozen:
            copy = BlockCopy(source=table[position], target=blocks.pop())
            table[position] = copy.target
            self.pool.release([copy.source])
            copies.append(copy)
        table.extend(blocks)
        if copies and self._rewritten is not None:
            self._rewritten.add(request.id)
        return tuple(copies)

    def _frozen(self, request: Request) -> list[int]:
        """The table positions, from the next write on, whose block is shared or indexed."""
        table, pool = self._tables[request.id], self.pool
        writable = range(request.num_planned // self.block_size, len(table))
        return [position for position in writable if not pool.is_private(table[position])]

    def num_to_take(self, request: Request, count: int) -> int:
        """The blocks that `reserve` would allocate."""
        num_new = self.blocks_for(request.num_planned + count) - len(self._tables[request.id])
        return len(self._frozen(request)) + max(num_new, 0)

    def need(self, request: Request) -> int:
        missing = max(0, self.blocks_for(request.num_expected) - len(self.table(request)))
        return missing if request.group is None else missing + request.group.blocks_to_join(self.block_size)

    def to_come(self, request: Request) -> int:
        return self.need(request) + request.num_slots

    def num_own(self, requests: Sequence[Request]) -> int:
        held = Counter(block for request in requests for block in self.held(request))
        return sum(self.pool.references(block) == count for block, count in held.items())

    def commit(self, request: Request) -> None:
        """Index the blocks that `request` has filled since the last call."""
        if self.prefix_caching:
            num_full, num_indexed = request.num_computed // self.block_size, self._num_indexed[request.id]
            if num_full > num_indexed:  # Most decodes fill no block.
                table = self._tables[request.id]
                inserted = self.index.insert(request, num_indexed, table[num_indexed:num_full])
                self.pool.mark_cached(inserted)
                if self.tiers is not None:
                    for block in inserted:
                        self.tiers.keep(PartKey(self.index.digest_of(block), KEYS_AND_VALUES), block)
                self._num_indexed[request.id] = num_full

    def trim(self, request: Request, num_tokens: int) -> None:
        """Release the blocks after the first `num_tokens` tokens of `request` (they were reserved for drafts)."""
        table = self._tables[request.id]
        spare = table[self.blocks_for(num_tokens) :]
        del table[len(table) - len(spare) :]
        self.pool.release(reversed(spare))
        if spare and self._rewritten is not None:
            self._rewritten.add(request.id)

    def release(self, request: Request) -> None:
        """Release every block that `request` holds, tail first."""
        table = self._tables.pop(request.id, [])
        num_indexed = self._num_indexed.pop(request.id, 0)
        if self.tiers is not None:  # There, too, the tail is evicted first.
            self.tiers.touch(reversed(request.block_digests[:num_indexed]))
        self.index.drop_claims(request)
        self.pool.release(reversed(table))

    def track_changes(self, on: bool) -> None:
        """Start (with no changes) or stop to record changes for `take_changes`."""
        self._rewritten = set() if on else None
        self.pool.track_changes(on)

    def take_changes(self) -> KVChanges:
        """The changes since the last call, while they are tracked."""
        rewritten = self._rewritten or set()
        if self._rewritten:
            self._rewritten = set()
        return KVChanges(self.pool.take_changes(), rewritten)


class HybridCache(KVCache):
    """The block tables of a model with recurrent layers, and its states, which follow them: a request has both."""

    states: StateSlots

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        num_states: int,
        snapshot_interval: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching)
        self.states = StateSlots(
            num_states, self.index, prefix_caching=prefix_caching, snapshot_interval=snapshot_interval
        )

    def use_tiers(self, tiers: Tiers, compute_seconds: ComputeSeconds) -> None:
        super().use_tiers(tiers, compute_seconds)
        self.states.tiers = tiers

    @property
    def resources(self) -> tuple[Resource, ...]:
        return self, self.states

    def _evicted(self, blocks: Sequence[int]) -> None:
        super()._evicted(blocks)
        self.states.evicted(blocks)

    def match(self, request: Request) -> PrefixMatch:
        return self.states.shorten(request, super().match(request))

    def tokens_at_hand(self, request: Request) -> int:
        return request.num_computed or len(self.match(request).blocks) * self.block_size

    def attach(self, request: Request, match: PrefixMatch) -> None:
        super().attach(request, match)
        self.states.attach(request, match)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Start `child` after `num_tokens` tokens of `parent`, or after fewer, where a state is kept."""
        num_tokens = self.states.fork_point(parent, num_tokens)
        super().fork(parent, child, num_tokens)
        self.states.fork(parent, child, num_tokens)

    # Each decode of each step calls `reserve` and `commit`; `super()` would take longer there.

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        return None if self.states.reserve(request, count) is None else KVCache.reserve(self, request, count)

    def commit(self, request: Request) -> None:
        KVCache.commit(self, request)
        self.states.commit(request)

    def trim(self, request: Request, num_tokens: int) -> None:
        super().trim(request, num_tokens)
        self.states.trim(request, num_tokens)

    def release(self, request: Request) -> None:
        super().release(request)
        self.states.release(request)

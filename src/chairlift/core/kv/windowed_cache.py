"""The KV accounting of models in which layers see a window, or a chunk, of the tokens before a token.

Layers that see the same tokens form groups, of which each has block tables of its own. Blocks that a group's next token
cannot see are released while the request runs:

    tokens         0 ..... 15 | 16 .... 31 | 32 .... 47 | 48 .. 52
    full layers         7     |      2     |      9     |    4
    window of 16        -     |      -     |      5     |    8       blocks 1 and 6 are free again

All groups take their blocks from one pool: a block is a piece of memory for as many layers as a table serves, so memory
moves between the groups by itself. Only their first layers' table has claims, since all groups compute the same tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.kv_cache import KVCache, KVChanges, Place
from chairlift.core.kv.prefix_index import Miss, PrefixMatch
from chairlift.core.plan import NO_LIMIT, BlockCopy
from chairlift.core.request import Request

NOWHERE = 0  # the entry of a table whose block was never held: nothing depends on what it contains


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back the tokens of some layers see."""

    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees only tokens of its own chunk of this many positions

    @property
    def is_full(self) -> bool:
        return self.window is None and self.chunk is None

    @property
    def words(self) -> str:
        kinds = {"a window of": self.window, "chunks of": self.chunk}
        return " and ".join(f"{kind} {size:,} tokens" for kind, size in kinds.items() if size) or "the whole context"

    @property
    def most(self) -> int:
        """The most tokens that a token sees."""
        return min(self.window or NO_LIMIT, self.chunk or NO_LIMIT)

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position`, or one behind it, sees."""
        by_window = 0 if self.window is None else position - self.window + 1
        by_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, by_window, by_chunk)


FULL = Reach()
NO_TIERS = "not possible yet with layers that see a window, or a chunk, of the tokens before a token"


class WindowedCache(KVCache):
    """The block tables of layers with one reach. Entries before the first block that a request holds stay as they are,
    and nothing depends on what they point to."""

    tiers_obstacle = NO_TIERS

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        reach: Reach,
        step_tokens: int,
        prefix_caching: bool = True,
        pool: BlockPool | None = None,
    ) -> None:
        """`step_tokens`: the most tokens of a request that are planned and not computed."""
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching, pool=pool)
        self.reach = reach
        self.step_tokens = step_tokens
        self._first: dict[str, int] = {}  # number of a table's first blocks that are not held
        self._kept: dict[str, tuple[range, ...]] = {}  # positions of blocks that later requests are likely to share

    # ---- prefix hits ------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixMatch:
        if not self.prefix_caching or request.needs_whole_prompt:
            return super().match(request)
        shareable = (request.num_known - 1) // self.block_size
        count = self.longest(request, shareable)
        first = self._first_needed(count * self.block_size)
        held = (self._cached_block(request, position) for position in range(first, count))
        blocks = (*[NOWHERE] * first, *held)
        if count == shareable:
            return PrefixMatch(blocks, None if blocks else Miss.TOO_SHORT)
        miss, in_progress = self.index.why_missing(request, count)
        return PrefixMatch(blocks, miss, in_progress)

    def longest(self, request: Request, most: int) -> int:
        """The largest number of blocks, up to `most`, after which `request` can continue with what is cached."""
        end = most
        while end:
            first = self._first_needed(end * self.block_size)
            missing = next((p for p in range(end - 1, first - 1, -1) if self.index.block_at(request, p) is None), None)
            if missing is None:
                return end
            end = missing
        return 0

    def _cached_block(self, request: Request, position: int) -> int:
        block = self.index.block_at(request, position)
        assert block is not None
        return block

    def tokens_at_hand(self, request: Request) -> int:
        return request.num_computed or len(self.match(request).blocks) * self.block_size

    def attach(self, request: Request, match: PrefixMatch) -> None:
        self.attach_to(request, match.blocks, len(match.blocks) + match.num_without_state)

    def attach_to(self, request: Request, blocks: Sequence[int], diverges: int) -> None:
        """Start the table of `request` with the last of these blocks. Its tokens differ from cached ones after
        `diverges` blocks."""
        first = self._first_needed(len(blocks) * self.block_size)
        self.pool.share(blocks[first:])
        self._tables[request.id] = [*[NOWHERE] * first, *blocks[first:]]
        self._first[request.id] = first
        self._num_indexed[request.id] = len(blocks)
        ends = {len(blocks), diverges, (request.num_prompt - 1) // self.block_size}
        self._kept[request.id] = tuple(range(self._first_needed(end * self.block_size), end) for end in ends if end)
        request.start_from(len(blocks) * self.block_size)

    def cached_blocks(self, request: Request, count: int) -> list[int]:
        """The blocks with which a table of `count` cached blocks starts."""
        first = self._first_needed(count * self.block_size)
        return [NOWHERE] * first + [self._cached_block(request, position) for position in range(first, count)]

    def _first_needed(self, num_tokens: int) -> int:
        """The first block that a token after `num_tokens` others needs."""
        return self.reach.first_seen(num_tokens) // self.block_size

    # ---- sharing ----------------------------------------------------------------------------------------------------

    def can_fork(self, parent: Request, num_tokens: int) -> bool:
        return self._first[parent.id] <= self._first_needed(num_tokens)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        assert child.id not in self._tables
        assert parent.num_computed >= num_tokens
        assert self.can_fork(parent, num_tokens), "the parent has released what the child needs"
        first = self._first[parent.id]
        shared = self._tables[parent.id][: self.blocks_for(num_tokens)]
        self.pool.share(shared[first:])
        self._tables[child.id] = list(shared)
        self._first[child.id] = first
        self._kept[child.id] = self._kept[parent.id]
        self._num_indexed[child.id] = num_tokens // self.block_size
        child.start_from(num_tokens)
        if self._rewritten is not None:
            self._rewritten.add(child.id)

    def _needed_from(self, request: Request) -> int:
        """The position of the next token for which blocks are kept: its own, or that of one which will fork from it."""
        if request.num_slots > 1:  # Beams join it again after a preemption, behind the whole blocks of the prompt.
            return min(request.num_computed, request.num_prompt // self.block_size * self.block_size)
        waits = request.params.num_sequences > 1 and request.leader is None and request.num_output < self.block_size
        return min(request.num_computed, request.num_prompt - 1) if waits else request.num_computed

    # ---- memory -----------------------------------------------------------------------------------------------------

    def first_held(self, request: Request) -> int:
        return self._first.get(request.id, 0)

    def held(self, request: Request) -> Sequence[int]:
        return self.table(request)[self._first.get(request.id, 0) :]

    def all_held(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(table[self._first[request_id] :]) for request_id, table in self._tables.items()}

    def _span(self, num_tokens: int) -> int:
        """The most blocks that so many tokens after the first computed ones, and what they see, lie in."""
        return self.blocks_for(self.reach.most + num_tokens) + 2

    def most_held(self, num_shared: int, num_own: int, beams: int = 1) -> int:
        if beams == 1:
            return min(num_shared + num_own, self._span(self.step_tokens))
        return min(num_shared, self._span(self.step_tokens)) + beams * num_own

    def room_behind(self, num_shared: int, beams: int = 1) -> int:
        return _most_own(self, num_shared, beams)

    def need(self, request: Request) -> int:
        start = self._needed_from(request)
        most = self.blocks_for(request.num_expected) - self._first_needed(start)
        if request.num_slots == 1:
            most = min(most, self._span(min(self.step_tokens, request.num_expected - request.num_computed)))
        missing = max(0, most - len(self.held(request)))
        return missing if request.group is None else missing + request.group.blocks_to_join(self.block_size)

    def release_unseen(self, request: Request) -> None:
        """Release the blocks that no further token of `request` sees."""
        self.release_before(request, self._first_needed(self._needed_from(request)))

    def release_before(self, request: Request, needed: int) -> None:
        """Release the blocks before the position `needed`."""
        first = self._first[request.id]
        if needed <= first:
            return
        table = self._tables[request.id]
        self._first[request.id] = needed
        # Blocks before those that came from host memory are not there to be indexed.
        self._num_indexed[request.id] = max(self._num_indexed[request.id], needed)
        for position in range(first, min(needed, len(table))):
            kept = any(position in span for span in self._kept[request.id])
            (self.pool.release if kept else self.pool.release_spent)((table[position],))
        table.extend([NOWHERE] * (needed - len(table)))  # tokens whose blocks come from host memory

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        table = self._tables[request.id]
        if len(table) * self.block_size < request.num_planned + count:  # Only then are more blocks needed.
            self.release_unseen(request)
        return super().reserve(request, count)

    def needed(self, request: Request) -> range:
        return range(self._first_needed(request.num_computed), self.blocks_for(request.num_computed))

    def restore(self, request: Request) -> dict[Place, int] | None:
        self.release_before(request, self.needed(request).start)  # Host memory has no block before it.
        return super().restore(request)

    def release(self, request: Request) -> None:
        first = self._first.pop(request.id, 0)
        self._kept.pop(request.id, None)
        table = self._tables.get(request.id)
        if table is not None:
            del table[:first]
        super().release(request)


def _most_own(kv: KVCache, num_shared: int, beams: int) -> int:
    """The largest number of blocks of its own that each of `beams` sequences can have."""
    fits = bisect_right(range(NO_LIMIT), kv.num_blocks, key=lambda own: kv.most_held(num_shared, own, beams))
    return fits - 1


class GroupedCache(KVCache):
    """The block tables of a model with several groups of layers: one of layers that see all tokens, and others beside
    it, over one pool. Every request has all of them, in step with each other."""

    tiers_obstacle = NO_TIERS

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        beside: Sequence[Reach],
        step_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        """`beside`: the reach of each other table."""
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching)
        self.windows = tuple(
            WindowedCache(
                num_blocks,
                block_size,
                reach=reach,
                step_tokens=step_tokens,
                prefix_caching=prefix_caching,
                pool=self.pool,
            )
            for reach in beside
        )

    @property
    def caches(self) -> tuple[KVCache, ...]:
        return (self, *self.windows)

    def _evicted(self, blocks: Sequence[int]) -> None:
        for cache in self.caches:
            indexed = cache.index.blocks()
            cache.index.remove([block for block in blocks if block in indexed])

    def tables_beside(self, request: Request) -> tuple[Sequence[int], ...]:
        return tuple(cache.table(request) for cache in self.windows)

    # ---- prefix hits ------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixMatch:
        match = super().match(request)
        count = num_found = len(match.blocks)
        longest = -1
        while longest != count:  # What one group can continue after may be too long for another.
            longest = count
            for cache in self.windows:
                count = cache.longest(request, count)
        if count == num_found:
            return match
        return PrefixMatch(match.blocks[:count], Miss.NO_WINDOW, match.in_progress, num_found - count)

    def tokens_at_hand(self, request: Request) -> int:
        return request.num_computed or len(self.match(request).blocks) * self.block_size

    def attach(self, request: Request, match: PrefixMatch) -> None:
        super().attach(request, match)
        count = len(match.blocks)
        for cache in self.windows:
            cache.attach_to(request, cache.cached_blocks(request, count), count + match.num_without_state)

    def can_fork(self, parent: Request, num_tokens: int) -> bool:
        return all(cache.can_fork(parent, num_tokens) for cache in self.windows)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        super().fork(parent, child, num_tokens)
        for cache in self.windows:
            cache.fork(parent, child, num_tokens)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def held(self, request: Request) -> Sequence[int]:
        return [*self.table(request), *(block for cache in self.windows for block in cache.held(request))]

    def all_held(self) -> dict[str, tuple[int, ...]]:
        held = self.tables()
        for cache in self.windows:
            for request_id, blocks in cache.all_held().items():
                held[request_id] += blocks
        return held

    def most_held(self, num_shared: int, num_own: int, beams: int = 1) -> int:
        beside = sum(cache.most_held(num_shared, num_own, beams) for cache in self.windows)
        return super().most_held(num_shared, num_own, beams) + beside

    def room_behind(self, num_shared: int, beams: int = 1) -> int:
        return _most_own(self, num_shared, beams)

    def need(self, request: Request) -> int:
        return super().need(request) + sum(cache.need(request) for cache in self.windows)

    def to_come(self, request: Request) -> int:
        return self.need(request) + request.num_slots * len(self.caches)

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        # All tables have the same length, and share the same of their last blocks with other requests.
        if not self.num_to_take(request, count):
            return ()
        for cache in self.windows:
            cache.release_unseen(request)
        if sum(cache.num_to_take(request, count) for cache in self.caches) > self.num_free:
            return None
        copies: list[BlockCopy] = []
        for made in (super().reserve(request, count), *(cache.reserve(request, count) for cache in self.windows)):
            assert made is not None
            copies += made
        return tuple(copies)

    def commit(self, request: Request) -> None:
        if request.num_computed // self.block_size > self._num_indexed[request.id]:  # Most decodes fill no block.
            super().commit(request)
            for cache in self.windows:
                cache.commit(request)

    def computed(self, request: Request) -> dict[Place, int]:
        return {
            (number, position): cache.table(request)[position]
            for number, cache in enumerate(self.caches)
            for position in cache.needed(request)
        }

    def restore(self, request: Request) -> dict[Place, int] | None:
        for cache in self.windows:
            cache.release_before(request, cache.needed(request).start)
        if sum(cache.num_to_restore(request) for cache in self.caches) > self.num_free:
            return None
        restored = super().restore(request)
        assert restored is not None
        for number, cache in enumerate(self.windows, 1):
            blocks = cache.restore(request)
            assert blocks is not None
            restored |= {(number, position): block for (_, position), block in blocks.items()}
        return restored

    def trim(self, request: Request, num_tokens: int) -> None:
        super().trim(request, num_tokens)
        for cache in self.windows:
            cache.trim(request, num_tokens)

    def release(self, request: Request) -> None:
        super().release(request)
        for cache in self.windows:
            cache.release(request)

    def take_changes(self) -> KVChanges:
        """Tables of windows change at their beginning, too: each is one that was rewritten."""
        return KVChanges(super().take_changes().blocks, set(self._tables))


def make_cache(
    num_blocks: int,
    block_size: int = 16,
    *,
    reaches: Sequence[Reach] = (FULL,),
    step_tokens: int = NO_LIMIT,
    prefix_caching: bool = True,
) -> KVCache:
    """The accounting of a model whose block tables have these reaches; of several, the first one is full."""
    first, *beside = reaches
    if beside:
        assert first.is_full
        return GroupedCache(
            num_blocks, block_size, beside=beside, step_tokens=step_tokens, prefix_caching=prefix_caching
        )
    if first.is_full:
        return KVCache(num_blocks, block_size, prefix_caching=prefix_caching)
    return WindowedCache(num_blocks, block_size, reach=first, step_tokens=step_tokens, prefix_caching=prefix_caching)

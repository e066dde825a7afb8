"""The pool of physical KV blocks.

A block is in exactly one of three states:

    used      reference count > 0: it stands in that many block tables
    cached    reference count 0, but its contents are indexed: a later request may take it up again
    empty     reference count 0, contents worthless

Cached and empty blocks are both *free*: both may be handed out. Empty ones go first, those used last before the rest,
then the cached ones, the least recently used first; handing out a cached block drops it from the index.

Blocks that were never used are written down nowhere: a simulation may have thousands of pools, each as large as a
GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from chairlift.core.kv.eviction import EvictionLine, Pile


class BlockPool:
    def __init__(self, num_blocks: int, on_evict: Callable[[Sequence[int]], None]) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._references: list[int] = []  # of the blocks that were used at some time: the first so many
        self._empty: list[int] = []  # used before, and next to be handed out: the last first
        self._cached: set[int] = set()  # blocks whose contents are indexed, used or free
        self._cached_free = EvictionLine()  # the free ones of them
        self._on_evict = on_evict
        self.num_evictions = 0
        self.num_lent = 0  # blocks that count as used though no table names them (a simulation does that)
        self.changed: set[int] | None = None  # while someone watches: blocks whose state may have changed

    @property
    def num_free(self) -> int:
        return self.num_empty + len(self._cached_free)

    @property
    def num_empty(self) -> int:
        nameless = self.num_lent + self._cached_free.num_nameless
        return len(self._empty) + self.num_blocks - len(self._references) - nameless

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def references(self, block: int) -> int:
        return self._references[block] if block < len(self._references) else 0

    def is_free(self, block: int) -> bool:
        return self.references(block) == 0

    def free_blocks(self) -> list[int]:
        """The free list, next to be handed out first."""
        return [*reversed(self._empty), *range(len(self._references), self.num_blocks), *self._cached_free]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_private(self, block: int) -> bool:
        """Whether its one owner may write to it: nobody else holds it, and what is in it is not indexed."""
        return self._references[block] == 1 and block not in self._cached

    def mark_cached(self, blocks: Sequence[int]) -> None:
        """Their contents are now indexed: keep them as long as possible once they are free."""
        assert all(map(self._references.__getitem__, blocks)), "a block is indexed while nobody holds it"
        self._cached.update(blocks)
        if self.changed is not None:
            self.changed.update(blocks)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one new owner, or None (and no change) if there are not as many."""
        if count > self.num_free:
            return None
        blocks = self._take_empty(min(count, self.num_empty))
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
            blocks += self._take_empty(count - len(blocks))  # of the evicted, those without a name
        for block in blocks:
            self._references[block] = 1
        if self.changed is not None:
            self.changed.update(blocks)
        return blocks

    def _take_empty(self, count: int) -> list[int]:
        """Those used last first, then some that never were."""
        used = min(count, len(self._empty))
        blocks = self._empty[len(self._empty) - used :]
        blocks.reverse()
        del self._empty[len(self._empty) - used :]
        never_used = len(self._references)
        blocks += range(never_used, never_used + count - used)
        self._references += [0] * (count - used)
        return blocks

    def _evict(self, count: int) -> list[int]:
        blocks = self._cached_free.evict(count)
        if blocks:
            self._cached.difference_update(blocks)
            self._on_evict(blocks)
        self.num_evictions += count
        return blocks

    def leave_pile(self, count: int, on_gone: Callable[[], None] | None) -> Pile:
        """`count` empty blocks become cached ones, as if someone had taken, filled and released them."""
        assert count <= self.num_empty
        return self._cached_free.append_pile(count, on_gone)

    def name(self, pile: Pile, count: int) -> list[int]:
        """The last `count` blocks of a pile, which someone will ask for. The first of them is evicted last."""
        blocks = self._take_empty(count)
        self._cached_free.name(pile, blocks)
        self._cached.update(blocks)
        return blocks

    def lend(self, count: int) -> None:
        """Count so many more blocks as used, without saying which; a negative count takes that back. For whoever needs
        to know when memory runs out and what is evicted by then, but not who holds which block."""
        if count > self.num_empty:
            self._empty += self._evict(count - self.num_empty)
        self.num_lent += count

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these; a cached free block comes back to life."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is shared but holds nothing"
                self._cached_free.remove(block)
            self._references[block] += 1
            if self.changed is not None:
                self.changed.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each. Pass a table's tail first: what is released first is evicted first."""
        references, cached = self._references, self._cached
        for block in blocks:
            count = references[block] = references[block] - 1
            assert count >= 0, f"block {block} is released twice"
            if self.changed is not None:
                self.changed.add(block)
            if count == 0:
                if block in cached:
                    self._cached_free.append(block)
                else:
                    self._empty.append(block)

"""The pool of physical KV blocks.

A block is in exactly one of three states:

    used      reference count > 0: it stands in that many block tables
    cached    reference count 0, but its contents are indexed: a later request may use it again
    empty     reference count 0, contents worthless

Cached and empty blocks are both *free*: both may be handed out. Empty ones go first, the most recently used before the
rest, then the cached ones, the least recently used first; handing out a cached block drops it from the index.

Blocks that were never used take no memory here: a simulation may have thousands of pools, each as large as a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from chairlift.core.kv.eviction import EvictionQueue


class BlockPool:
    """Counts the references to each block and hands out free ones."""

    def __init__(
        self, num_blocks: int, on_evict: Callable[[Sequence[int]], None], queue: EvictionQueue | None = None
    ) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._references: list[int] = []  # of the blocks that were ever used: the first ones
        self._empty: list[int] = []  # used before; handed out from the end
        self._cached: set[int] = set()  # blocks whose contents are indexed, used or free
        self._cached_free = EvictionQueue() if queue is None else queue  # the free ones among them
        self._on_evict = on_evict
        self._changed: set[int] | None = None  # while changes are tracked: blocks whose state may have changed
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return self.num_empty + len(self._cached_free)

    @property
    def num_empty(self) -> int:
        return len(self._empty) + self.num_blocks - len(self._references)

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
        """Whether its one owner may write to it: no other table has it, and its contents are not indexed."""
        return self._references[block] == 1 and block not in self._cached

    def mark_cached(self, blocks: Sequence[int]) -> None:
        """The contents of these blocks are indexed now: keep them as long as possible once they are free."""
        assert all(map(self._references.__getitem__, blocks)), "an indexed block must be in a table"
        self._cached.update(blocks)
        if self._changed is not None:
            self._changed.update(blocks)

    def take(self, count: int) -> list[int] | None:
        """Hand out `count` blocks to one new owner, or return None (and change nothing) if there are fewer."""
        if count > self.num_free:
            return None
        blocks = self._take_empty(min(count, self.num_empty))
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._references[block] = 1
        if self._changed is not None:
            self._changed.update(blocks)
        return blocks

    def _take_empty(self, count: int) -> list[int]:
        """The most recently used ones first, then some that were never used."""
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

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of these; a cached free block is used again."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is shared but holds nothing"
                self._cached_free.remove(block)
            self._references[block] += 1
            if self._changed is not None:
                self._changed.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner of each. Pass a table's tail first: what is released first is evicted first."""
        references, cached = self._references, self._cached
        for block in blocks:
            count = references[block] = references[block] - 1
            assert count >= 0, f"block {block} is released twice"
            if self._changed is not None:
                self._changed.add(block)
            if count == 0:
                if block in cached:
                    self._cached_free.append(block)
                else:
                    self._empty.append(block)

    def track_changes(self, on: bool) -> None:
        """Start afresh to note changed blocks, or stop."""
        self._changed = set() if on else None

    def take_changes(self) -> list[int]:
        """The blocks whose state may have changed since the last call, in order."""
        changed = sorted(self._changed or ())
        if self._changed:
            self._changed.clear()
        return changed

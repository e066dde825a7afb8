"""The pool of physical KV blocks.

A block is in exactly one of three states:

    used      reference count > 0: it stands in that many block tables
    cached    reference count 0, but its contents are indexed: a later request may take it up again
    empty     reference count 0, contents worthless

Cached and empty blocks are both *free*: both may be handed out. The free list is ordered so that empty ones go
first and, among the cached, the least recently used; handing out a cached block drops it from the index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._cached: set[int] = set()  # blocks whose contents are indexed, used or free
        self._num_empty = num_blocks
        self._on_evict = on_evict
        self.num_evictions = 0
        self.changed: set[int] | None = None  # while someone watches: blocks whose state may have changed

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_empty(self) -> int:
        return self._num_empty

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_free(self, block: int) -> bool:
        return block in self._free

    def free_blocks(self) -> list[int]:
        """The free list, next to be handed out first."""
        return list(self._free)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def mark_cached(self, block: int) -> None:
        """Its contents are now indexed: keep it as long as possible once it is free."""
        assert self._references[block] > 0, f"block {block} is indexed while nobody holds it"
        self._cached.add(block)
        if self.changed is not None:
            self.changed.add(block)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one new owner, or None (and no change) if there are not as many."""
        free, cached = self._free, self._cached
        if count > len(free):
            return None
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            if block in cached:
                cached.remove(block)
                self._on_evict(block)
                self.num_evictions += 1
            else:
                self._num_empty -= 1
        if self.changed is not None:
            self.changed.update(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these; a cached free block comes back to life."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is shared but holds nothing"
                del self._free[block]
            self._references[block] += 1
            if self.changed is not None:
                self.changed.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each. Pass a table's tail first: what is released first is evicted first."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released twice"
            self._references[block] -= 1
            if self.changed is not None:
                self.changed.add(block)
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._cached:
                    self._num_empty += 1
                    self._free.move_to_end(block, last=False)

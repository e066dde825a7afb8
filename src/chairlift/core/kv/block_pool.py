"""What requests hold while they run, and the pool of physical KV blocks.

A block is in exactly one of three states:

    used      reference count > 0: the number of block tables that contain it
    cached    reference count 0, but its contents are indexed: a later request may share it
    empty     reference count 0, contents not needed

Cached and empty blocks are both *free*. Empty ones are allocated first, most recently used first, then cached ones, in
the order of an `Eviction`; allocating a cached block evicts it from the index.

Blocks that were never used take no memory here: a simulation may have thousands of pools, each as large as a GPU's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from chairlift.core.evictions.base import UNKNOWN_USE, Eviction, LRUEviction, Use
from chairlift.core.plan import BlockCopy
from chairlift.core.request import Request


class Resource(ABC):
    """Memory with its own accounting: the blocks of the KV cache, or the state slots of recurrent layers.

    A request is admitted if every resource has what it needs. What is reserved stays reserved until the step is
    planned, even if another resource is short.
    """

    @property
    @abstractmethod
    def num_free(self) -> int:
        """How much no request holds."""

    @abstractmethod
    def num_own(self, requests: Sequence[Request]) -> int:
        """How much only `requests` hold."""

    @abstractmethod
    def need(self, request: Request) -> int:
        """How much a request, or all beams of a search, still needs for its known tokens."""

    @abstractmethod
    def to_come(self, request: Request) -> int:
        """How much a running request will still take: for its known tokens, and for the output of each of its slots."""

    @abstractmethod
    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        """Reserve what the next `count` tokens of `request` need; return the copies to make before they are written, or
        None if it is short."""

    @abstractmethod
    def commit(self, request: Request) -> None:
        """Keep what later requests can share, now that the result of a step has been applied."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release everything that `request` holds."""


class BlockPool:
    """Counts the references to each block and allocates free ones."""

    def __init__(
        self, num_blocks: int, on_evict: Callable[[Sequence[int]], None], eviction: Eviction[int] | None = None
    ) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._references: list[int] = []  # One for each block that was ever used; these are the first ones.
        self._empty: list[int] = []  # used before; allocated from the end
        self._cached: set[int] = set()  # blocks whose contents are indexed, used or free
        # The free blocks among the cached ones ...
        self._cached_free: Eviction[int] = LRUEviction() if eviction is None else eviction
        self._spent: OrderedDict[int, None] = OrderedDict()  # ... but for these, which are evicted before them
        self._on_evict = on_evict
        self._changed: set[int] | None = None  # while changes are tracked: blocks whose state may have changed
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return self.num_empty + len(self._spent) + len(self._cached_free)

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
        """The free blocks in the order of allocation."""
        never_used = range(len(self._references), self.num_blocks)
        return [*reversed(self._empty), *never_used, *self._spent, *self._cached_free]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_private(self, block: int) -> bool:
        """Whether its owner may write to it: no other table contains it, and its contents are not indexed."""
        return self._references[block] == 1 and block not in self._cached

    def mark_cached(self, blocks: Sequence[int]) -> None:
        """Mark these blocks as indexed, so that they are evicted last once they are free."""
        assert all(map(self._references.__getitem__, blocks)), "an indexed block must be in a table"
        self._cached.update(blocks)
        if self._changed is not None:
            self._changed.update(blocks)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Mark indexed blocks as not indexed any more."""
        for block in blocks:
            self._cached.remove(block)
            if self._references[block] == 0:
                self._remove_free(block)
                self._empty.append(block)

    def _remove_free(self, block: int) -> None:
        """Remove a free cached block from the order of eviction."""
        if block in self._spent:
            del self._spent[block]
        else:
            self._cached_free.remove(block)

    def take(self, count: int) -> list[int] | None:
        """Allocate `count` blocks for one owner; return None (and change nothing) if fewer are free."""
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
        """Take the most recently used empty blocks, then blocks that were never used."""
        used = min(count, len(self._empty))
        blocks = self._empty[len(self._empty) - used :]
        blocks.reverse()
        del self._empty[len(self._empty) - used :]
        never_used = len(self._references)
        blocks += range(never_used, never_used + count - used)
        self._references += [0] * (count - used)
        return blocks

    def _evict(self, count: int) -> list[int]:
        spent = [self._spent.popitem(last=False)[0] for _ in range(min(count, len(self._spent)))]
        blocks = spent + self._cached_free.evict(count - len(spent))
        if blocks:
            self._cached.difference_update(blocks)
            self._on_evict(blocks)
        self.num_evictions += count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which are used or cached."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is shared but its contents are not cached"
                self._remove_free(block)
            self._references[block] += 1
            if self._changed is not None:
                self._changed.add(block)

    def release(self, blocks: Iterable[int], use: Use = UNKNOWN_USE) -> None:
        """Remove one reference from each. Blocks released first are evicted first, so pass the tail of a table
        first. `use` is what is known of the request that had them."""
        references, cached = self._references, self._cached
        for block in blocks:
            count = references[block] = references[block] - 1
            assert count >= 0, f"block {block} is released twice"
            if self._changed is not None:
                self._changed.add(block)
            if count == 0:
                if block in cached:
                    self._cached_free.append(block, use)
                else:
                    self._empty.append(block)

    def release_spent(self, blocks: Iterable[int]) -> None:
        """The same for blocks that are less likely to be shared than all others: they are evicted first."""
        for block in blocks:
            self.release((block,))
            if self._references[block] == 0 and block in self._cached:
                self._cached_free.remove(block)
                self._spent[block] = None

    def track_changes(self, on: bool) -> None:
        """Start (with no changes) or stop to record changed blocks."""
        self._changed = set() if on else None

    def take_changes(self) -> list[int]:
        """The blocks whose state may have changed since the last call, in order."""
        changed = sorted(self._changed or ())
        if self._changed:
            self._changed.clear()
        return changed

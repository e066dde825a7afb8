"""A block pool that can count blocks without assigning block numbers.

A simulation needs the number of blocks in use and the eviction order, but for most requests not which blocks they hold.
Blocks in use can therefore be *counted* without being in a table. Cached blocks of finished requests are kept as
*groups* of anonymous blocks. If a later prompt shares some of a group, these blocks get numbers and keep their position
in the eviction order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.eviction import EvictionQueue


class BlockGroup:
    """Consecutive blocks in the eviction order: first the anonymous ones, then the numbered ones in reverse."""

    __slots__ = ("num_anonymous", "numbered", "on_evicted")

    def __init__(self, num_anonymous: int, on_evicted: Callable[[], None] | None) -> None:
        self.num_anonymous = num_anonymous
        self.numbered: list[int] = []
        self.on_evicted = on_evicted  # called when the last block is evicted, unless some got numbers


class GroupEvictionQueue(EvictionQueue):
    """Single blocks and groups in the order of eviction."""

    def __init__(self) -> None:
        self.num_anonymous = 0  # in all groups
        self._line: OrderedDict[int | BlockGroup, None] = OrderedDict()
        self._num_groups = 0
        self._group_of: dict[int, BlockGroup] = {}  # the numbered blocks in groups

    def __len__(self) -> int:
        return len(self._line) - self._num_groups + self.num_anonymous + len(self._group_of)

    def __iter__(self) -> Iterator[int]:
        """The blocks that have numbers."""
        for entry in self._line:
            if isinstance(entry, BlockGroup):
                yield from reversed(entry.numbered)
            else:
                yield entry

    def append(self, block: int) -> None:
        self._line[block] = None

    def remove(self, block: int) -> None:
        group = self._group_of.pop(block, None) if self._group_of else None
        if group is None:
            del self._line[block]
            return
        group.numbered.remove(block)
        if not group.numbered and not group.num_anonymous:
            del self._line[group]
            self._num_groups -= 1

    def evict(self, count: int) -> list[int]:
        """Remove the first `count` blocks; return those that have numbers."""
        evicted: list[int] = []
        while count > 0:
            first = next(iter(self._line))
            if isinstance(first, BlockGroup):
                count -= self._take_from(first, count, evicted)
            else:
                del self._line[first]
                evicted.append(first)
                count -= 1
        return evicted

    def _take_from(self, group: BlockGroup, most: int, evicted: list[int]) -> int:
        """Evict up to `most` blocks of the first group, whose rest stays first; return the number evicted."""
        anonymous = min(group.num_anonymous, most)
        group.num_anonymous -= anonymous
        self.num_anonymous -= anonymous
        numbered = min(len(group.numbered), most - anonymous)
        for _ in range(numbered):
            block = group.numbered.pop()
            del self._group_of[block]
            evicted.append(block)
        if not group.num_anonymous and not group.numbered:
            del self._line[group]
            self._num_groups -= 1
            if group.on_evicted is not None:
                group.on_evicted()
        return anonymous + numbered

    def append_group(self, num_blocks: int, on_evicted: Callable[[], None] | None) -> BlockGroup:
        assert num_blocks > 0
        group = BlockGroup(num_blocks, on_evicted)
        self._line[group] = None
        self._num_groups += 1
        self.num_anonymous += num_blocks
        return group

    def name(self, group: BlockGroup, blocks: Sequence[int]) -> None:
        """Assign numbers to the last blocks of a group; the first of `blocks` is evicted last."""
        assert not group.numbered
        assert len(blocks) <= group.num_anonymous
        group.numbered, group.on_evicted = list(blocks), None
        group.num_anonymous -= len(blocks)
        self.num_anonymous -= len(blocks)
        self._group_of.update(dict.fromkeys(blocks, group))


class CountingBlockPool(BlockPool):
    """A pool that also counts blocks without numbers."""

    _cached_free: GroupEvictionQueue

    def __init__(self, num_blocks: int, on_evict: Callable[[Sequence[int]], None]) -> None:
        super().__init__(num_blocks, on_evict, GroupEvictionQueue())
        self.num_counted = 0  # blocks in use that are in no table

    @property
    def num_empty(self) -> int:
        return super().num_empty - self.num_counted - self._cached_free.num_anonymous

    def _evict(self, count: int) -> list[int]:
        blocks = super()._evict(count)
        return blocks + self._take_empty(count - len(blocks))  # numbers for the anonymous blocks among the evicted

    def count_used(self, count: int) -> None:
        """Count `count` more blocks as used, with the evictions that this causes; a negative count reverts it."""
        if count > self.num_empty:
            self._empty += super()._evict(count - self.num_empty)
        self.num_counted += count

    def add_cached_group(self, count: int, on_evicted: Callable[[], None] | None) -> BlockGroup:
        """Turn `count` empty blocks into cached ones, as if a request had filled and released them."""
        assert count <= self.num_empty
        return self._cached_free.append_group(count, on_evicted)

    def name(self, group: BlockGroup, count: int) -> list[int]:
        """Assign numbers to the last `count` blocks of a group, because a prompt shares them; the first is evicted
        last."""
        blocks = self._take_empty(count)
        self._cached_free.name(group, blocks)
        self._cached.update(blocks)
        return blocks

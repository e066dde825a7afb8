"""A block pool that can count blocks without naming them.

A simulation needs to know when memory runs out and what is evicted by then, but for most requests not which blocks they
hold. Blocks in use can therefore be *lent*: counted, but in no table. Cached blocks of finished requests are left in
*piles*, of which no block has a name. If a later prompt shares what is in a pile, the blocks concerned are named and
keep their place in the eviction order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.eviction import EvictionQueue


class Pile:
    """Blocks that are next to each other in the eviction order: first the nameless ones, then the named in reverse."""

    __slots__ = ("named", "num_nameless", "on_gone")

    def __init__(self, num_nameless: int, on_gone: Callable[[], None] | None) -> None:
        self.num_nameless = num_nameless
        self.named: list[int] = []
        self.on_gone = on_gone  # called when the last block is evicted, unless some were named


class PiledEvictionQueue(EvictionQueue):
    """Single blocks and piles, the next one to be evicted first."""

    def __init__(self) -> None:
        self.num_nameless = 0  # in all piles
        self._line: OrderedDict[int | Pile, None] = OrderedDict()
        self._num_piles = 0
        self._pile_of: dict[int, Pile] = {}  # the named blocks in piles

    def __len__(self) -> int:
        return len(self._line) - self._num_piles + self.num_nameless + len(self._pile_of)

    def __iter__(self) -> Iterator[int]:
        """The blocks that have names."""
        for entry in self._line:
            if isinstance(entry, Pile):
                yield from reversed(entry.named)
            else:
                yield entry

    def append(self, block: int) -> None:
        self._line[block] = None

    def remove(self, block: int) -> None:
        pile = self._pile_of.pop(block, None) if self._pile_of else None
        if pile is None:
            del self._line[block]
            return
        pile.named.remove(block)
        if not pile.named and not pile.num_nameless:
            del self._line[pile]
            self._num_piles -= 1

    def evict(self, count: int) -> list[int]:
        """Remove the first `count` blocks; return those of them that have names."""
        evicted: list[int] = []
        while count > 0:
            first = next(iter(self._line))
            if isinstance(first, Pile):
                count -= self._take_from(first, count, evicted)
            else:
                del self._line[first]
                evicted.append(first)
                count -= 1
        return evicted

    def _take_from(self, pile: Pile, most: int, evicted: list[int]) -> int:
        """Evict up to `most` blocks of the first pile, whose rest stays first; return how many."""
        nameless = min(pile.num_nameless, most)
        pile.num_nameless -= nameless
        self.num_nameless -= nameless
        named = min(len(pile.named), most - nameless)
        for _ in range(named):
            block = pile.named.pop()
            del self._pile_of[block]
            evicted.append(block)
        if not pile.num_nameless and not pile.named:
            del self._line[pile]
            self._num_piles -= 1
            if pile.on_gone is not None:
                pile.on_gone()
        return nameless + named

    def append_pile(self, num_blocks: int, on_gone: Callable[[], None] | None) -> Pile:
        assert num_blocks > 0
        pile = Pile(num_blocks, on_gone)
        self._line[pile] = None
        self._num_piles += 1
        self.num_nameless += num_blocks
        return pile

    def name(self, pile: Pile, blocks: Sequence[int]) -> None:
        """Name the last blocks of a pile; the first of `blocks` is to be evicted last."""
        assert not pile.named
        assert len(blocks) <= pile.num_nameless
        pile.named, pile.on_gone = list(blocks), None
        pile.num_nameless -= len(blocks)
        self.num_nameless -= len(blocks)
        self._pile_of.update(dict.fromkeys(blocks, pile))


class LendingBlockPool(BlockPool):
    """A pool that also counts lent blocks and piles."""

    _cached_free: PiledEvictionQueue

    def __init__(self, num_blocks: int, on_evict: Callable[[Sequence[int]], None]) -> None:
        super().__init__(num_blocks, on_evict, PiledEvictionQueue())
        self.num_lent = 0  # blocks that count as used though no table has them

    @property
    def num_empty(self) -> int:
        return super().num_empty - self.num_lent - self._cached_free.num_nameless

    def _evict(self, count: int) -> list[int]:
        blocks = super()._evict(count)
        return blocks + self._take_empty(count - len(blocks))  # names for the nameless among the evicted

    def lend(self, count: int) -> None:
        """Count `count` more blocks as used, evicting what taking them would; a negative count takes that back."""
        if count > self.num_empty:
            self._empty += super()._evict(count - self.num_empty)
        self.num_lent += count

    def leave_pile(self, count: int, on_gone: Callable[[], None] | None) -> Pile:
        """Turn `count` empty blocks into cached ones, as if a request had taken, filled and released them."""
        assert count <= self.num_empty
        return self._cached_free.append_pile(count, on_gone)

    def name(self, pile: Pile, count: int) -> list[int]:
        """Name the last `count` blocks of a pile, because a prompt shares them. The first of them is evicted last."""
        blocks = self._take_empty(count)
        self._cached_free.name(pile, blocks)
        self._cached.update(blocks)
        return blocks

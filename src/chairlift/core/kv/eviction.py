"""The line for eviction: free blocks whose contents may be asked for again, the least recently used first.

A simulation knows of most of them only how many there are: it leaves whole *piles*, of which no block has a name.
Should someone ask for what is in one, the blocks in question get names and stay where they are in the line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence


class Pile:
    """Blocks next to each other in the line. The nameless ones go first, then the named, the last first."""

    __slots__ = ("named", "num_nameless", "on_gone")

    def __init__(self, num_nameless: int, on_gone: Callable[[], None] | None) -> None:
        self.num_nameless = num_nameless
        self.named: list[int] = []
        self.on_gone = on_gone  # told when the last one is evicted, unless some were given names


class EvictionLine:
    def __init__(self) -> None:
        self.num_nameless = 0  # in all piles
        self._line: OrderedDict[int | Pile, None] = OrderedDict()
        self._num_piles = 0
        self._pile_of: dict[int, Pile] = {}  # the named blocks in piles

    def __len__(self) -> int:
        """Blocks."""
        return len(self._line) - self._num_piles + self.num_nameless + len(self._pile_of)

    def __iter__(self) -> Iterator[int]:
        """Those that have names, next to be evicted first."""
        for entry in self._line:
            if isinstance(entry, Pile):
                yield from reversed(entry.named)
            else:
                yield entry

    def append(self, block: int) -> None:
        self._line[block] = None

    def remove(self, block: int) -> None:
        """It is used again."""
        pile = self._pile_of.pop(block, None) if self._pile_of else None
        if pile is None:
            del self._line[block]
            return
        pile.named.remove(block)
        if not pile.named and not pile.num_nameless:
            del self._line[pile]
            self._num_piles -= 1

    def evict(self, count: int) -> list[int]:
        """The first `count` leave the line; returns those of them that have names."""
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
        """What is left of the pile stays at the head of the line. Returns how many were taken."""
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

    # ---- piles --------------------------------------------------------------------------------------------------

    def append_pile(self, num_blocks: int, on_gone: Callable[[], None] | None) -> Pile:
        assert num_blocks > 0
        pile = Pile(num_blocks, on_gone)
        self._line[pile] = None
        self._num_piles += 1
        self.num_nameless += num_blocks
        return pile

    def name(self, pile: Pile, blocks: Sequence[int]) -> None:
        """The last so many blocks of it, which are nameless, are these; the first of them is to be evicted last."""
        assert not pile.named
        assert len(blocks) <= pile.num_nameless
        pile.named, pile.on_gone = list(blocks), None
        pile.num_nameless -= len(blocks)
        self.num_nameless -= len(blocks)
        self._pile_of.update(dict.fromkeys(blocks, pile))

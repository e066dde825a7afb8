"""The eviction order of free cached blocks: least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class EvictionQueue:
    """Free cached blocks in the order of eviction."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def append(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        """Remove a block that is used again."""
        del self._blocks[block]

    def evict(self, count: int) -> list[int]:
        """Remove the first `count` blocks and return them."""
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]

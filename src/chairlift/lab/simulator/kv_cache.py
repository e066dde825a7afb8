"""KV accounting for a simulation: prompts are indexed only if another prompt might share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import PrefixIndex
from chairlift.core.request import Request
from chairlift.lab.simulator.block_pool import LendingBlockPool


def quick_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """A cheap digest: in a simulation it is enough that equal blocks after equal prefixes have equal ones."""
    return hash((parent, tokens)).to_bytes(8, "little", signed=True)


class LazyPrefixIndex(PrefixIndex):
    """A prefix index in which blocks can be registered by one digest, and are indexed when that is looked up."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, quick_digest)
        self._deferred: dict[bytes, Callable[[], None]] = {}  # digest -> what indexes that block

    def defer(self, digest: bytes, index_now: Callable[[], None]) -> None:
        """Call `index_now` when `digest` is looked up; it has to call `cancel` and index or claim that block and
        perhaps others after it. In a simulation most are never looked up."""
        self._deferred[digest] = index_now

    def cancel(self, digest: bytes) -> None:
        del self._deferred[digest]

    def has(self, digest: bytes) -> bool:
        """Whether such a block is cached, deferred or being computed."""
        return digest in self._block_of or digest in self._claims or digest in self._deferred

    def _lookup(self, digest: bytes) -> int | None:
        if digest in self._deferred:
            self._deferred[digest]()
        return super()._lookup(digest)

    def remove(self, blocks: Iterable[int]) -> None:
        super().remove(block for block in blocks if block in self._entry_of)  # others: `leave_blocks`


class SimulatedKVCache(KVCache):
    """Counts the blocks of most requests without naming them."""

    index: LazyPrefixIndex
    pool: LendingBlockPool

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching)
        self.index = LazyPrefixIndex(block_size)
        self.pool = LendingBlockPool(num_blocks, on_evict=self.index.remove)

    def leave_blocks(self, request: Request, num_tokens: int) -> None:
        """Give a request that is about to end the blocks for all its `num_tokens` computed tokens. With prefix caching
        the full ones count as cached; they are not indexed, since no simulated prompt shares generated tokens."""
        table = self._tables[request.id]
        blocks = self.pool.take(self.blocks_for(num_tokens) - len(table))
        assert blocks is not None
        table += blocks
        if self.prefix_caching:
            self.pool.mark_cached(table[self._num_indexed[request.id] : num_tokens // self.block_size])

"""KV accounting for a simulation: prompts are indexed only if another prompt might share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import Miss, PrefixIndex, PrefixMatch, TokenHolder
from chairlift.core.request import Request
from chairlift_lab.simulator.block_pool import CountingBlockPool


def quick_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """A fast digest without protection against collisions."""
    return hash((parent, tokens)).to_bytes(8, "little", signed=True)


class LazyPrefixIndex(PrefixIndex):
    """A prefix index in which a prompt can be registered by one digest and is indexed when that is looked up."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, quick_digest)
        self._digest_of: dict[int, bytes] = {}
        self._deferred: dict[bytes, Callable[[], None]] = {}  # digest -> callback that indexes the block

    def defer(self, digest: bytes, index_now: Callable[[], None]) -> None:
        """Call `index_now` when `digest` is looked up; it must call `cancel` and index or claim the block. Most digests
        are never looked up."""
        self._deferred[digest] = index_now

    def cancel(self, digest: bytes) -> None:
        del self._deferred[digest]

    def has(self, digest: bytes) -> bool:
        """Whether the block is cached, deferred or being computed."""
        return digest in self._block_of or digest in self._claims or digest in self._deferred

    def _lookup(self, digest: bytes) -> int | None:
        if digest in self._deferred:
            self._deferred[digest]()
        return super()._lookup(digest)

    # Without the tokens of blocks and without the digests of evicted ones: fleets of 1,000 replicas fit into memory.

    def find(self, request: TokenHolder) -> PrefixMatch:
        blocks: list[int] = []
        for position in range((request.num_known - 1) // self.block_size):
            digest = self.digest(request, position)
            block = self._lookup(digest)
            if block is None:
                return PrefixMatch(tuple(blocks), Miss.NEVER_SEEN, in_progress=digest in self._claims)
            blocks.append(block)
        return PrefixMatch(tuple(blocks), None if blocks else Miss.TOO_SHORT)

    def insert(self, request: TokenHolder, first: int, blocks: Sequence[int]) -> list[int]:
        digests = self.digests(request, first + len(blocks))
        inserted = []
        for position, block in enumerate(blocks, first):
            digest = digests[position]
            if self._lookup(digest) is None:
                self._block_of[digest] = block
                self._digest_of[block] = digest
                self._claims.pop(digest, None)
                inserted.append(block)
        return inserted

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            digest = self._digest_of.pop(block, None)
            if digest is not None:  # blocks with generated tokens are not indexed: `leave_blocks`
                del self._block_of[digest]


class SimulatedKVCache(KVCache):
    """KV accounting that counts the blocks of most requests without assigning block numbers."""

    index: LazyPrefixIndex
    pool: CountingBlockPool

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching)
        self.index = LazyPrefixIndex(block_size)
        self.pool = CountingBlockPool(num_blocks, on_evict=self.index.remove)

    def leave_blocks(self, request: Request, num_tokens: int) -> None:
        """Allocate blocks for the `num_tokens` computed tokens of a request that is about to end. With prefix caching
        the full ones count as cached, but are not indexed, since no simulated prompt contains generated tokens."""
        table = self._tables[request.id]
        blocks = self.pool.take(self.blocks_for(num_tokens) - len(table))
        assert blocks is not None
        table += blocks
        if self.prefix_caching:
            self.pool.mark_cached(table[self._num_indexed[request.id] : num_tokens // self.block_size])

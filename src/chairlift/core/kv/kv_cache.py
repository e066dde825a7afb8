"""KV memory as accounting: who holds which blocks. The tensors themselves live in `execution`.

The analogy is virtual memory. A request sees its tokens as contiguous; its block table maps each run of
`block_size` tokens to a physical block anywhere in the pool, and several tables may point at the same block.

    tokens      0 ........ 15 | 16 ....... 31 | 32 .. 37
    table            7        |       2       |    9          block 9 has 10 slots left
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.prefix_index import Digest, Miss, PrefixIndex, PrefixMatch, sha256
from chairlift.core.plan import BlockCopy
from chairlift.core.request import Request


class KVCache:
    def __init__(
        self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True, digest: Digest = sha256
    ) -> None:
        """`digest`: of blocks in the prefix index. Where nobody means harm, as in a simulation, any hash will do."""
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(block_size, digest)
        self.pool = BlockPool(num_blocks, on_evict=self.index.remove)
        self._tables: dict[str, list[int]] = {}
        self._num_indexed: dict[str, int] = {}  # how many of a table's first blocks commit() has been through
        self.rewritten: set[str] | None = None  # while someone watches: requests whose tables changed in the middle

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> Sequence[int]:
        return self._tables.get(request.id, ())

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(table) for request_id, table in self._tables.items()}

    def match(self, request: Request) -> PrefixMatch:
        """The cached blocks `request` could start with. Only asks: no block changes hands, except in a
        simulation that had put something off (see `PrefixIndex.put_off`)."""
        return self.index.find(request) if self.prefix_caching else PrefixMatch((), Miss.DISABLED)

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Begin `request`'s table with the blocks of `match`; their tokens count as computed."""
        assert request.id not in self._tables
        self.pool.share(match.blocks)
        self._tables[request.id] = list(match.blocks)
        self._num_indexed[request.id] = len(match.blocks)
        request.start_from(len(match.blocks) * self.block_size)
        if self.prefix_caching:
            self.index.claim(request)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Begin `child`'s table with the blocks of `parent`'s first `num_tokens` tokens, the last one perhaps partly
        filled: whoever writes into a shared block first gets a copy of it (see `reserve`)."""
        assert child.id not in self._tables
        assert parent.num_computed >= num_tokens
        shared = self._tables[parent.id][: self.blocks_for(num_tokens)]
        self.pool.share(shared)
        self._tables[child.id] = list(shared)
        self._num_indexed[child.id] = num_tokens // self.block_size
        child.start_from(num_tokens)
        if self.rewritten is not None:
            self.rewritten.add(child.id)  # a beam may have had another table until now

    def restore(self, request: Request) -> list[int] | None:
        """Blocks for computed tokens that `request`'s table lacks, to be filled from elsewhere; None (and no change) if
        memory is short."""
        table = self._tables[request.id]
        blocks = self.pool.take(self.blocks_for(request.num_computed) - len(table))
        if blocks is not None:
            table.extend(blocks)
        return blocks

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        """Make room to write `request`'s next `count` tokens, into blocks that it alone holds.

        Returns the copies that must be made first, or None (and no change) if memory is short.
        """
        table = self._tables[request.id]
        planned, room = request.num_planned, len(table) * self.block_size
        if room - self.block_size <= planned <= room - count and self.pool.is_private(table[-1]):
            return ()  # as with most decodes: it writes on in its last block
        frozen = self._frozen_positions(request, table)
        num_new = self.blocks_for(planned + count) - len(table)
        blocks = self.pool.take(len(frozen) + max(num_new, 0))
        if blocks is None:
            return None
        copies = []
        for position in frozen:
            copy = BlockCopy(source=table[position], target=blocks.pop())
            table[position] = copy.target
            self.pool.release([copy.source])
            copies.append(copy)
        table.extend(blocks)
        if copies and self.rewritten is not None:
            self.rewritten.add(request.id)
        return tuple(copies)

    def _frozen_positions(self, request: Request, table: Sequence[int]) -> list[int]:
        """Positions from the next write on whose block others hold too, or whose contents are indexed."""
        first = request.num_planned // self.block_size
        return [position for position in range(first, len(table)) if not self.pool.is_private(table[position])]

    def num_missing(self, request: Request) -> int:
        """Blocks that `request` does not hold yet but needs for the tokens it knows."""
        return max(0, self.blocks_for(request.num_expected) - len(self.table(request)))

    def num_own(self, requests: Sequence[Request]) -> int:
        """Blocks that would be free without `requests`."""
        held = Counter(block for request in requests for block in self.table(request))
        return sum(self.pool.references(block) == count for block, count in held.items())

    def commit(self, request: Request) -> None:
        """Index the blocks that `request` has filled by now."""
        if not self.prefix_caching:
            return
        num_full, num_indexed = request.num_computed // self.block_size, self._num_indexed[request.id]
        if num_full <= num_indexed:  # as with most decodes
            return
        table = self._tables[request.id]
        self.pool.mark_cached(self.index.insert(request, num_indexed, table[num_indexed:num_full]))
        self._num_indexed[request.id] = num_full

    def leave_behind(self, request: Request, num_tokens: int) -> None:
        """`request` is about to end with so many tokens computed: give it the blocks for all of them. With prefix
        caching, the full ones count as cached. Nobody will ask for what it generated (a simulation knows that), so they
        are not indexed; but they take their place among the cached blocks, until they are evicted."""
        table = self._tables[request.id]
        blocks = self.pool.take(self.blocks_for(num_tokens) - len(table))
        assert blocks is not None
        table += blocks
        if self.prefix_caching:
            self.pool.mark_cached(table[self._num_indexed[request.id] : num_tokens // self.block_size])

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks behind `request`'s first `num_tokens` tokens, which were reserved for drafts."""
        table = self._tables[request.id]
        spare = table[self.blocks_for(num_tokens) :]
        del table[len(table) - len(spare) :]
        self.pool.release(reversed(spare))
        if spare and self.rewritten is not None:
            self.rewritten.add(request.id)

    def release(self, request: Request) -> None:
        """The one way out: give back every block `request` holds, tail first."""
        table = self._tables.pop(request.id, [])
        self._num_indexed.pop(request.id, None)
        self.index.disclaim(request)
        self.pool.release(reversed(table))

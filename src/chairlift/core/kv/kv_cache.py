"""KV accounting: which request holds which blocks. The tensors belong to the runner.

This works like virtual memory. The tokens of a request are logically contiguous; its block table maps each run of
`block_size` tokens to a physical block anywhere in the pool, and several tables may contain the same block.

    tokens      0 ........ 15 | 16 ....... 31 | 32 .. 37
    table            7        |       2       |    9          block 9 has 10 slots left
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.prefix_index import Miss, PrefixIndex, PrefixMatch
from chairlift.core.plan import BlockCopy, Chunk, ChunkStates
from chairlift.core.request import Request


@dataclass(frozen=True, slots=True)
class KVChanges:
    """The changes since the last call of `KVCache.take_changes`."""

    blocks: list[int]  # blocks whose state may have changed, in order
    rewritten: set[str]  # ids of requests whose tables changed other than at their end


class StateUsage(NamedTuple):
    """How many state slots requests hold, hold snapshots, and exist."""

    used: int
    snapshots: int
    total: int


class KVCache:
    """The block tables of all requests, over one pool and one prefix index.

    `HybridCache` adds the states of recurrent layers; without it, no request needs any.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(block_size)
        self.pool = BlockPool(num_blocks, on_evict=self.index.remove)
        self._tables: dict[str, list[int]] = {}
        self._num_indexed: dict[str, int] = {}  # number of a table's first blocks that are indexed
        self._rewritten: set[str] | None = None  # see `KVChanges`; None while changes are not tracked

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def state_usage(self) -> StateUsage | None:
        """None without recurrent layers."""
        return None

    @property
    def num_free_states(self) -> int:
        """State slots that can be allocated."""
        return 0

    @property
    def max_beams(self) -> int | None:
        """The beams of one search that there are state slots for; None: any number."""
        return None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> Sequence[int]:
        return self._tables.get(request.id, ())

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(table) for request_id, table in self._tables.items()}

    def match(self, request: Request) -> PrefixMatch:
        """Find the cached blocks that `request` can start with."""
        if not self.prefix_caching:
            return PrefixMatch((), Miss.DISABLED)
        return PrefixMatch((), Miss.WHOLE_PROMPT) if request.needs_whole_prompt else self.index.find(request)

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Start the table of `request` with the blocks of `match`; their tokens count as computed."""
        assert request.id not in self._tables
        self.pool.share(match.blocks)
        self._tables[request.id] = list(match.blocks)
        self._num_indexed[request.id] = len(match.blocks)
        request.start_from(len(match.blocks) * self.block_size)

    def claim(self, request: Request) -> None:
        """Announce the blocks that `request` will compute; requests with the same prefix then wait for them."""
        if self.prefix_caching:
            self.index.claim(request)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Start the table of `child` with the blocks of the first `num_tokens` tokens of `parent`. The last block may
        be partly filled: the first write into a shared block copies it (see `reserve`)."""
        assert child.id not in self._tables
        assert parent.num_computed >= num_tokens
        shared = self._tables[parent.id][: self.blocks_for(num_tokens)]
        self.pool.share(shared)
        self._tables[child.id] = list(shared)
        self._num_indexed[child.id] = num_tokens // self.block_size
        child.start_from(num_tokens)
        if self._rewritten is not None:
            self._rewritten.add(child.id)  # a beam may have had a different table before

    def restore(self, request: Request) -> list[int] | None:
        """Allocate the blocks of computed tokens that are in host memory; None (and no change) if memory is short."""
        table = self._tables[request.id]
        blocks = self.pool.take(self.blocks_for(request.num_computed) - len(table))
        if blocks is not None:
            table.extend(blocks)
        return blocks

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        """Allocate blocks for the next `count` tokens of `request`, which it alone may write to.

        Returns the copies to make before writing, or None (and no change) if memory is short.
        """
        table = self._tables[request.id]
        planned, room = request.num_planned, len(table) * self.block_size
        if room - self.block_size <= planned <= room - count and self.pool.is_private(table[-1]):
            return ()  # most decodes: the last block has room
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
        if copies and self._rewritten is not None:
            self._rewritten.add(request.id)
        return tuple(copies)

    def _frozen_positions(self, request: Request, table: Sequence[int]) -> list[int]:
        """Table positions, from the next write on, whose block is shared or indexed."""
        first = request.num_planned // self.block_size
        return [position for position in range(first, len(table)) if not self.pool.is_private(table[position])]

    def num_missing(self, request: Request) -> int:
        """The number of blocks that `request` still needs for its known tokens."""
        return max(0, self.blocks_for(request.num_expected) - len(self.table(request)))

    def num_own(self, requests: Sequence[Request]) -> int:
        """The number of blocks that only `requests` hold."""
        held = Counter(block for request in requests for block in self.table(request))
        return sum(self.pool.references(block) == count for block, count in held.items())

    def commit(self, request: Request) -> None:
        """Index the blocks that `request` has filled since the last call."""
        if not self.prefix_caching:
            return
        num_full, num_indexed = request.num_computed // self.block_size, self._num_indexed[request.id]
        if num_full <= num_indexed:  # most decodes
            return
        table = self._tables[request.id]
        self.pool.mark_cached(self.index.insert(request, num_indexed, table[num_indexed:num_full]))
        self._num_indexed[request.id] = num_full

    def trim(self, request: Request, num_tokens: int) -> None:
        """Release the blocks after the first `num_tokens` tokens of `request` (they were reserved for drafts)."""
        table = self._tables[request.id]
        spare = table[self.blocks_for(num_tokens) :]
        del table[len(table) - len(spare) :]
        self.pool.release(reversed(spare))
        if spare and self._rewritten is not None:
            self._rewritten.add(request.id)

    def release(self, request: Request) -> None:
        """Release every block that `request` holds, tail first."""
        table = self._tables.pop(request.id, [])
        self._num_indexed.pop(request.id, None)
        self.index.drop_claims(request)
        self.pool.release(reversed(table))

    def plan_states(self, chunks: Sequence[Chunk]) -> tuple[ChunkStates, ...]:
        """The state slots that the chunks of a step read and write; none without recurrent layers."""
        return ()

    def states_needed(self, request: Request) -> int:
        """State slots that a request, or all beams of a search, still need to be admitted."""
        return 0

    def states_promised(self, running: Sequence[Request]) -> int:
        """Free state slots that running requests may still need."""
        return 0

    def num_own_states(self, requests: Sequence[Request]) -> int:
        """The number of state slots that only `requests` hold."""
        return 0

    def draft_room(self) -> int | None:
        """Draft tokens of a step that there are state slots for; None: as many as the budget allows."""
        return None

    def track_changes(self, on: bool) -> None:
        """Start (with no changes) or stop to record changes for `take_changes`."""
        self._rewritten = set() if on else None
        self.pool.track_changes(on)

    def take_changes(self) -> KVChanges:
        """The changes since the last call, while they are tracked."""
        rewritten = self._rewritten or set()
        if self._rewritten:
            self._rewritten = set()
        return KVChanges(self.pool.take_changes(), rewritten)

"""The engine's KV accounting and scheduler for a simulation, and its requests.

Most requests run outside of the scheduler (`steady_decodes.py`). A simulation needs the number of blocks in use and the
eviction order, but for most requests not which blocks they hold. Blocks in use can therefore be *counted* without being
in a table. Cached blocks of finished requests are kept as *groups* of anonymous blocks. If a later prompt shares some
of a group, these blocks get numbers and keep their position in the eviction order. Only shared prompts are indexed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from chairlift.core.events import RequestAdmitted, RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.evictions.base import UNKNOWN_USE, Eviction, Use
from chairlift.core.kv.block_pool import BlockPool, Resource
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import Miss, PrefixIndex, PrefixMatch, TokenHolder
from chairlift.core.plan import PlanBuilder
from chairlift.core.request import Request, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.state import SchedulerState
from chairlift_lab.simulator.outcome import RequestRecord


class BlockGroup:
    """Consecutive blocks in the eviction order: first the anonymous ones, then the numbered ones in reverse."""

    __slots__ = ("num_anonymous", "numbered", "on_evicted")

    def __init__(self, num_anonymous: int, on_evicted: Callable[[], None] | None) -> None:
        self.num_anonymous = num_anonymous
        self.numbered: list[int] = []
        self.on_evicted = on_evicted  # called when the last block is evicted, unless some got numbers


class GroupEvictionQueue(Eviction[int]):
    """Single blocks and groups in the order of eviction."""

    def __init__(self) -> None:
        self.num_anonymous = 0  # the anonymous blocks in all groups
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

    def append(self, block: int, use: Use = UNKNOWN_USE) -> None:
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

    def assign_numbers(self, group: BlockGroup, blocks: Sequence[int]) -> None:
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
        self._cached_free.assign_numbers(group, blocks)
        self._cached.update(blocks)
        return blocks


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


# ---- the scheduler and its requests ----------------------------------------------------------------------------------

_LAST_TOKEN = 2**32 - 1
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class SimulatedState(SchedulerState):
    """Scheduler state with `num_aside` more running requests, which decode in every step."""

    num_aside = 0

    def slots_with(self, running: Sequence[Request]) -> int:
        return super().slots_with(running) + self.num_aside

    def promised(self, resource: Resource) -> int:
        return super().promised(resource) + self.num_aside

    @property
    def batch_is_over(self) -> bool:
        return super().batch_is_over and not self.num_aside


class SimulatedRequest:
    """An open request. Most run from arrival to end without being submitted to the scheduler."""

    __slots__ = (
        *("block_digests", "group", "length", "num_found", "order"),
        *("prompt", "record", "request", "shared", "since"),
    )
    salt = ""
    images = ()

    def __init__(self, record: RequestRecord, prompt: Sequence[int], order: int) -> None:
        self.record = record
        self.prompt = prompt
        self.order = order  # place in the order of submission
        self.request: Request | None = None  # its request in the scheduler, if it was submitted
        self.since = 0  # steps taken when it was set aside (`steady_decodes.py`) ...
        self.length = 0  # ... and the number of its known tokens then
        self.block_digests: list[bytes] = []  # digests of the blocks of its prompt
        # While it is not submitted, with a prefix cache (`LazyIndexing`):
        self.shared: Sequence[int] = ()  # blocks with the start of its prompt that were cached before it arrived ...
        self.num_found = 0  # ... and how many tokens that is
        self.group: BlockGroup | None = None  # blocks with the rest of its prompt, in the cache since it ended

    @property
    def tokens(self) -> Sequence[int]:
        return self.prompt

    @property
    def num_known(self) -> int:
        """Its known tokens while it waits."""
        return self.record.n_in if self.request is None else self.request.num_known

    @property
    def num_computed(self) -> int:
        """Tokens that it found in the prefix cache when it was admitted."""
        return self.num_found if self.request is None else self.request.num_computed


def token_of(request: Request) -> int:
    """The token that stands for all generated tokens of a request; no other request has it."""
    return _LAST_TOKEN - request.order


class SimulatedScheduler(Scheduler):
    """A scheduler whose steps also have the tokens of requests that are kept aside."""

    state_type = SimulatedState
    admits_with_room_to_grow: ClassVar[bool] = True
    """Whether a request is admitted only if running ones keep a block each for their output."""
    kv: SimulatedKVCache
    state: SimulatedState

    def __init__(self, kv: SimulatedKVCache, *others: Any, **options: Any) -> None:
        super().__init__(kv, *others, **options)
        self.preemptions = 0
        self.memory_is_short = False  # Requests that are kept aside were preempted for the step to be planned.
        self.on_start: Callable[[RequestRecord], None] = lambda record: None  # called at the first token
        self.on_end: Callable[[RequestRecord], None] = lambda record: None
        self._by_id: dict[str, SimulatedRequest] = {}  # those that were submitted to the scheduler

    def _begin_plan(self, now: float) -> PlanBuilder:
        """The plan of a step that also has one token of each request that is kept aside."""
        builder = super()._begin_plan(now)
        builder.room -= self.state.num_aside
        builder.prefill_room = min(builder.prefill_room, builder.room)
        builder.memory_was_short = self.memory_is_short
        return builder

    def enter(self, simulated: SimulatedRequest) -> Request:
        """Submit a request to the scheduler as of its arrival."""
        record = simulated.record
        request = Request(
            str(simulated.order),
            simulated.prompt,
            _GREEDY,
            max_new_tokens=record.n_out,
            arrival=record.arrival,
            tenant=record.tenant,
        )
        if record.service_class is not None:
            request.targets = record.service_class.targets
        request.order = simulated.order
        request.block_digests = simulated.block_digests
        simulated.request = request
        self._by_id[request.id] = simulated
        self.submit(request, record.arrival)
        return request

    def enter_running(self, simulated: SimulatedRequest) -> Request:
        request = self.enter(simulated)
        self.start(request)
        return request

    def start(self, request: Request) -> None:
        """Remove a request from the queue; it runs outside of the scheduler."""
        self.waiting.remove(request)
        request.status = Status.RUNNING

    def find(self, request: Request) -> SimulatedRequest:
        return self._by_id[request.id]

    def record_events(self) -> None:
        """Record the events of the scheduler."""
        for event in self.drain_events():
            if isinstance(event, TokenProduced):
                self.start_output(self._by_id[event.request_id].record, event.time)
            elif isinstance(event, RequestAdmitted):
                record = self._by_id[event.request_id].record
                if record.first_token is None:
                    record.cached = event.cached_tokens
            elif isinstance(event, RequestFinished):
                self.end(self._by_id.pop(event.request_id), event.time)
            elif isinstance(event, RequestPreempted):
                self.preemptions += 1

    def start_output(self, record: RequestRecord, now: float) -> None:
        """Record the time of a token if it is the request's first."""
        if record.first_token is None:
            record.first_token = now
            self.on_start(record)

    def end(self, simulated: SimulatedRequest, now: float) -> None:
        simulated.record.end = now
        self.on_end(simulated.record)

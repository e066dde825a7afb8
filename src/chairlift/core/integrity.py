"""Invariants of the scheduler and the KV accounting.

Tests check them after every step of random workloads. They also document what always holds.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

from chairlift.core.adapters import AdapterStatus
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import block_content
from chairlift.core.kv.state_slots import StateSlots
from chairlift.core.plan import NO_SLOT, StepPlan
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.scheduler import Scheduler


def check_accounting(scheduler: Scheduler) -> None:
    """Check that no block is lost, that reference counts match the tables, and that only running requests hold
    blocks."""
    kv, pool = scheduler.kv, scheduler.kv.pool
    tables = kv.all_held()
    holders = Counter(block for table in tables.values() for block in table)
    holders.update(kv.loads.held_blocks() if kv.loads is not None else ())
    free = pool.free_blocks()
    listed = set(free)
    assert len(free) == len(listed) == pool.num_free, "a block is in the free list twice"
    for block in range(pool.num_blocks):
        assert pool.references(block) == holders[block], f"block {block}: reference count differs from its tables"
        assert (block in listed) == pool.is_free(block) == (holders[block] == 0), (
            f"block {block} is lost or handed out twice"
        )
    assert pool.num_empty == sum(not pool.is_cached(block) for block in free), "empty blocks are counted wrong"
    for request_id, table in tables.items():
        assert len(table) == len(set(table)), f"{request_id} holds a block twice"
        request = scheduler.get(request_id)
        assert request is not None, f"{request_id} is gone but holds blocks"
        may_hold = request.status is Status.RUNNING or request in scheduler.idle
        assert may_hold or request.steps_in_flight, f"{request_id} waits but holds blocks"
        for cache in kv.caches:
            check_table(cache, request)
    for request in scheduler.running:
        assert request.id in tables, f"{request.id} is running without a table"
    for cache in kv.caches:
        assert cache.tables().keys() == tables.keys(), "a request lacks one of the tables"
        assert all(map(pool.is_cached, cache.index.blocks())), "an indexed block is not marked as cached"
    indexed = Counter(block for cache in kv.caches for block in cache.index.blocks())
    assert sorted(indexed.elements()) == sorted(filter(pool.is_cached, range(pool.num_blocks))), (
        "a cached block is in no index, or in two"
    )
    for name, queue in (("running", scheduler.running), ("waiting", list(scheduler.waiting))):
        orders = [request.order for request in queue]
        assert orders == sorted(set(orders)), f"{name} is out of order"
    assert scheduler.state.slots_taken <= scheduler.max_batch_requests
    assert scheduler.policy.keeps_slots or not scheduler.idle
    check_swap(scheduler)
    check_adapters(scheduler)
    if kv.states is not None:
        check_states(scheduler, kv.states)
    waiting = scheduler.waiting
    assert waiting.reasons() == Counter(map(waiting.last_reason, waiting)), "reasons to wait are counted wrong"
    assert scheduler.running or not scheduler.idle, "a batch has ended, but its slots are not free"


def check_table(cache: KVCache, request: Request) -> None:
    """Check that a request holds all blocks that its further tokens write or see."""
    assert len(cache.table(request)) >= cache.blocks_for(request.num_planned), f"{request.id} lacks blocks"
    needed = cache.needed(request)
    assert not needed or cache.first_held(request) <= needed.start, f"{request.id} has released what it still sees"


def check_adapters(scheduler: Scheduler) -> None:
    """Check that what requests hold or steps in flight use is resident, and that no slot or byte is lost."""
    pool = scheduler.adapters
    in_memory = pool.in_memory
    slots = [adapter.slot for adapter in in_memory]
    assert len(slots) == len(set(slots)) <= pool.max_slots, "a slot has two adapters"
    assert pool.num_bytes <= pool.max_bytes, "the adapters in memory take more than there is"
    for adapter in {*pool.registered, *in_memory}:
        assert (adapter.slot >= 0) == (adapter in in_memory) == (adapter.status is not AdapterStatus.REGISTERED)
        assert adapter.is_idle or adapter.status is AdapterStatus.RESIDENT, f"{adapter.name} is used but not resident"
        assert adapter.num_users >= 0
        assert adapter.steps_in_flight >= 0
    for request in scheduler.running:
        assert pool.ready(request), f"{request.id} runs without its adapter"
        assert all(use.adapter.num_users for use in request.adapters), f"{request.id} does not hold its adapter"


def check_swap(scheduler: Scheduler) -> None:
    """Check that every host slot is free or holds one block of a waiting request with computed tokens."""
    swap, slots = scheduler.swap, scheduler.swap.slots()
    held = [slot for own in slots.values() for slot in own]
    assert len(held) == len(set(held)), "a host slot is held twice"
    assert len(held) + swap.num_free == swap.num_slots, "a host slot is lost"
    for request_id, own in slots.items():
        request = scheduler.get(request_id)
        assert request is not None, f"{request_id} is gone but holds host slots"
        assert request.status is Status.WAITING, f"{request_id} holds host slots while running"
        needed = sum(len(cache.needed(request)) for cache in scheduler.kv.caches)
        assert len(own) == needed, f"{request_id} lacks blocks on the host"
    for request in scheduler.waiting:
        assert request.id in slots or request.num_computed == 0, (
            f"{request.id} has computed tokens, but no blocks or host slots"
        )


def check_states(scheduler: Scheduler, state_slots: StateSlots) -> None:
    """Check that no state slot is lost, that reference counts match the requests, and that every snapshot belongs to a
    cached block."""
    kv, slots, states = scheduler.kv, state_slots.slots, state_slots.by_request()
    holders = Counter(slot for own in states.values() for slot in own.held())
    holders.update(kv.loads.held_slots() if kv.loads is not None else ())
    free = slots.free_blocks()
    assert len(free) == len(set(free)) == slots.num_free, "a state slot is in the free list twice"
    for slot in range(slots.num_blocks):
        assert slots.references(slot) == holders[slot], f"state slot {slot}: reference count differs from its holders"
        assert (slot in free) == (holders[slot] == 0), f"state slot {slot} is lost or handed out twice"
    assert states.keys() == kv.tables().keys(), "a request has states without a table, or a table without states"
    snapshots = dict(state_slots.snapshots.items())
    assert all(map(kv.pool.is_cached, snapshots)), "a snapshot belongs to a block that is not cached"
    assert set(snapshots.values()) == {slot for slot in range(slots.num_blocks) if slots.is_cached(slot)}
    for request in scheduler.running:
        own = states[request.id]
        assert (own.current == NO_SLOT) == (request.num_planned == 0), f"{request.id} has no state of its tokens"
    for digest, request_id in state_slots.expected_snapshots().items():
        owner, own = scheduler.get(request_id), states[request_id]
        assert owner is not None
        still_to_come = [
            other for position, other in own.wanted.items() if position >= owner.num_planned or position in own.pending
        ]
        assert digest in still_to_come, f"{request_id} will not take a snapshot that others expect"


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that a plan is within the budget and writes only to blocks that one request holds alone."""
    limits = scheduler.limits
    assert limits is not None
    # The tokens of an image that sees itself whole are computed together even if there are more of them.
    whole = max((image.rows for chunk in plan.chunks for image in chunk.request.images if image.whole), default=0)
    assert plan.num_tokens <= limits.tokens + whole
    assert plan.num_tokens - plan.num_decode_tokens <= limits.prefill_tokens + whole
    kv = scheduler.kv
    written: set[int] = set()
    for chunk in plan.chunks:
        request = chunk.request
        assert chunk.count >= 1
        assert chunk.end == request.num_planned <= request.num_expected + len(chunk.drafts)
        assert not chunk.drafts or (chunk.samples and chunk.known_end == request.num_known)
        assert not chunk.read or plan.reads, "the plan does not say that a chunk reads prompt positions"
        assert not chunk.read or chunk.start <= chunk.read.start < chunk.read.stop <= chunk.end
        assert not (chunk.samples and chunk.known_end - 1 in chunk.read), "a row is both sampled and read"
        first, last = chunk.start // kv.block_size, (chunk.end - 1) // kv.block_size
        for block in (block for table in (chunk.table, *chunk.beside) for block in table[first : last + 1]):
            assert kv.pool.references(block) == 1, f"{request.id} writes block {block}, which is shared"
            assert not kv.pool.is_cached(block), f"{request.id} writes block {block}, which is indexed"
            assert block not in written
            written.add(block)
    if kv.states is not None:
        check_written_states(kv.states, plan)
    check_planned_states(plan)
    targets = [copy.target for copy in plan.copies]
    assert len(targets) == len(set(targets))
    assert set(targets) <= written, "a block is copied but not written to"


def check_written_states(state_slots: StateSlots, plan: StepPlan) -> None:
    """Check that each chunk has states, and writes only to slots that its request alone holds and that are no
    snapshots."""
    states, slots = state_slots.by_request(), state_slots.slots
    for chunk, planned in zip(plan.chunks, plan.states, strict=True):
        held = Counter(states[chunk.request.id].held())
        for _, slot in planned.writes:
            assert not slots.is_cached(slot), f"{chunk.request.id} writes state slot {slot}, which is a snapshot"
            assert held[slot] == slots.references(slot) > 0, f"{chunk.request.id} writes a slot that others hold"


def check_planned_states(plan: StepPlan) -> None:
    """Check that each state slot is written at most once, and by no chunk but the one that reads it."""
    writer: dict[int, int] = {}
    for index, states in enumerate(plan.states):
        rows = [row for row, _ in states.writes]
        assert rows == sorted(set(rows))
        assert rows[-1] == plan.chunks[index].count - 1, "the state after a chunk is lost"
        for _, slot in states.writes:
            assert slot not in writer, f"state slot {slot} is written twice"
            writer[slot] = index
    for index, states in enumerate(plan.states):
        assert (states.read == NO_SLOT) == (plan.chunks[index].start == 0)
        assert writer.get(states.read, index) == index, f"state slot {states.read} is read and written by two chunks"


def check_shared_prefixes(scheduler: Scheduler) -> None:
    """Check that every indexed block in a table has the tokens, images, prefix and salt of the request."""
    for kv, request in product(scheduler.kv.caches, scheduler.running):
        first = kv.first_held(request)
        for position, block in enumerate(kv.table(request)[first:], first):
            if kv.pool.is_cached(block):
                parent, tokens = kv.index.prefix_of(block)
                start = position * kv.block_size
                assert tokens == block_content(request, start, start + kv.block_size)
                assert parent == kv.index.parent_digest(request, position)


def check_quiescent(scheduler: Scheduler) -> None:
    """Check that all blocks and host slots are free once no work is left."""
    assert not scheduler.has_work
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    assert not scheduler.kv.tables()
    assert scheduler.swap.num_free == scheduler.swap.num_slots
    assert scheduler.kv.states is None or scheduler.kv.states.slots.num_used == 0

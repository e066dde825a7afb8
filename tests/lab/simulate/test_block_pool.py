"""Blocks that a simulation counts without block numbers."""

from __future__ import annotations

from chairlift_lab.simulator.scheduler import CountingBlockPool


def pool_of(size: int) -> tuple[CountingBlockPool, list[int]]:
    evicted: list[int] = []
    return CountingBlockPool(size, evicted.extend), evicted


def test_counted_blocks_are_used_and_cause_the_same_evictions() -> None:
    pool, evicted = pool_of(4)
    blocks = pool.take(3) or []
    for block in blocks[:2]:
        pool.mark_cached([block])
    pool.release(blocks[:2])
    pool.count_used(1)  # the one that was never used
    assert (pool.num_empty, pool.num_free) == (0, 2)
    assert pool.take(1) == [blocks[0]]  # the empty one is counted as used
    pool.count_used(1)
    assert evicted == blocks[:2]
    assert pool.take(1) is None
    pool.count_used(-2)
    assert (pool.num_empty, pool.num_free) == (2, 2)


def test_numbered_blocks_of_a_group_keep_their_position_in_the_eviction_order() -> None:
    pool, evicted = pool_of(4)
    gone: list[str] = []
    group = pool.add_cached_group(3, lambda: gone.append("group"))
    later = pool.take(1)
    assert later is not None
    pool.mark_cached(later)
    pool.release(later)
    assert (pool.num_empty, pool.num_free) == (0, 4)
    head, tail = pool.name(group, 2)
    assert (pool.num_empty, pool.num_free) == (0, 4)
    assert pool.take(1) is not None
    assert evicted == []  # the anonymous block of the group
    pool.share([head])
    assert pool.take(2) == [tail, *later]
    assert evicted == [tail, *later]
    assert gone == []
    assert pool.num_free == 0


def test_a_nameless_pile_reports_its_eviction() -> None:
    pool, evicted = pool_of(3)
    gone: list[str] = []
    pool.add_cached_group(2, lambda: gone.append("group"))
    pool.count_used(2)
    assert (pool.num_empty, pool.num_free, gone) == (0, 1, [])
    blocks = pool.take(1)
    assert blocks is not None
    assert len(blocks) == 1
    assert gone == ["group"]
    assert evicted == []
    assert pool.take(1) is None

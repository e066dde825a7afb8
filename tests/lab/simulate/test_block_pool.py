"""Blocks that a simulation counts without naming them."""

from __future__ import annotations

from chairlift.lab.simulator.block_pool import LendingBlockPool


def pool_of(size: int) -> tuple[LendingBlockPool, list[int]]:
    evicted: list[int] = []
    return LendingBlockPool(size, evicted.extend), evicted


def test_lent_blocks_count_as_used_and_evict_what_taking_them_would() -> None:
    pool, evicted = pool_of(4)
    blocks = pool.take(3) or []
    for block in blocks[:2]:
        pool.mark_cached([block])
    pool.release(blocks[:2])
    pool.lend(1)  # the one that was never used
    assert (pool.num_empty, pool.num_free) == (0, 2)
    assert pool.take(1) == [blocks[0]]  # though an empty one is there: it is lent
    pool.lend(1)
    assert evicted == blocks[:2]
    assert pool.take(1) is None
    pool.lend(-2)
    assert (pool.num_empty, pool.num_free) == (2, 2)


def test_named_blocks_of_a_pile_keep_their_place_in_the_eviction_order() -> None:
    pool, evicted = pool_of(4)
    gone: list[str] = []
    pile = pool.leave_pile(3, lambda: gone.append("pile"))
    later = pool.take(1)
    assert later is not None
    pool.mark_cached(later)
    pool.release(later)
    assert (pool.num_empty, pool.num_free) == (0, 4)
    head, tail = pool.name(pile, 2)
    assert (pool.num_empty, pool.num_free) == (0, 4)
    assert pool.take(1) is not None
    assert evicted == []  # the one of the pile that has no name
    pool.share([head])
    assert pool.take(2) == [tail, *later]
    assert evicted == [tail, *later]
    assert gone == []
    assert pool.num_free == 0


def test_a_nameless_pile_reports_its_eviction() -> None:
    pool, evicted = pool_of(3)
    gone: list[str] = []
    pool.leave_pile(2, lambda: gone.append("pile"))
    pool.lend(2)
    assert (pool.num_empty, pool.num_free, gone) == (0, 1, [])
    blocks = pool.take(1)
    assert blocks is not None
    assert len(blocks) == 1
    assert gone == ["pile"]
    assert evicted == []
    assert pool.take(1) is None

from __future__ import annotations

import pytest

from chairlift.core.kv.block_pool import BlockPool


def pool_of(size: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(size, evicted.extend), evicted


def test_takes_in_order_and_refuses_what_it_has_not() -> None:
    pool, _ = pool_of(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert pool.take(1) == [3]


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool, _ = pool_of(2)
    (block,) = pool.take(1) or []
    pool.share([block])
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)


def test_releasing_twice_is_caught() -> None:
    pool, _ = pool_of(2)
    blocks = pool.take(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_empty_blocks_are_handed_out_before_cached_ones_and_those_in_lru_order() -> None:
    pool, evicted = pool_of(4)
    blocks = pool.take(4) or []
    for block in (0, 1, 2):
        pool.mark_cached([block])
    pool.release([1])
    pool.release([0])
    pool.release([3])  # not cached: worthless, so first to go
    pool.release([2])
    assert blocks == [0, 1, 2, 3]
    assert pool.free_blocks() == [3, 1, 0, 2]
    assert pool.take(3) == [3, 1, 0]
    assert evicted == [1, 0]


def test_a_cached_free_block_comes_back_to_life() -> None:
    pool, evicted = pool_of(2)
    pool.take(1)
    pool.mark_cached([0])
    pool.release([0])
    pool.share([0])
    assert pool.references(0) == 1
    assert pool.take(2) is None
    assert evicted == []


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


def test_blocks_of_a_pile_that_get_names_keep_their_place_in_the_line() -> None:
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


def test_a_pile_without_names_says_when_it_is_gone() -> None:
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

from __future__ import annotations

import pytest

from chairlift.core.kv.block_pool import BlockPool


def pool_of(size: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(size, evicted.extend), evicted


def test_blocks_are_allocated_in_order_until_none_is_free() -> None:
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


def test_releasing_a_block_twice_fails() -> None:
    pool, _ = pool_of(2)
    blocks = pool.take(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_empty_blocks_are_allocated_before_cached_ones_and_those_in_lru_order() -> None:
    pool, evicted = pool_of(4)
    blocks = pool.take(4) or []
    for block in (0, 1, 2):
        pool.mark_cached([block])
    pool.release([1])
    pool.release([0])
    pool.release([3])  # not cached, so allocated first
    pool.release([2])
    assert blocks == [0, 1, 2, 3]
    assert pool.free_blocks() == [3, 1, 0, 2]
    assert pool.take(3) == [3, 1, 0]
    assert evicted == [1, 0]


def test_a_cached_free_block_can_be_shared_again() -> None:
    pool, evicted = pool_of(2)
    pool.take(1)
    pool.mark_cached([0])
    pool.release([0])
    pool.share([0])
    assert pool.references(0) == 1
    assert pool.take(2) is None
    assert evicted == []

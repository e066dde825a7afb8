from __future__ import annotations

from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.prefix_index import Miss
from chairlift.core.plan import BlockCopy
from chairlift.core.request import Request
from tests.core.driving import make_request


def compute(kv: KVCache, request: Request, count: int | None = None) -> None:
    """Reserve blocks, mark the tokens as computed, and commit."""
    count = request.num_behind if count is None else count
    if request.id not in kv.tables():
        kv.attach(request, kv.match(request))
        count = min(count, request.num_behind)
    assert kv.reserve(request, count) is not None
    request.start_from(request.num_computed + count)
    kv.commit(request)


def test_a_second_request_shares_full_blocks_but_never_the_last_token() -> None:
    kv = KVCache(10, block_size=4)
    first = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8])
    compute(kv, first)
    second = make_request("b", [1, 2, 3, 4, 5, 6, 7, 8])
    match = kv.match(second)
    assert match.blocks == (0,)  # block 1 holds the last token, whose logits are needed
    assert match.miss is None
    kv.attach(second, match)
    assert second.num_computed == 4
    assert kv.pool.references(0) == 2


def test_match_changes_nothing() -> None:
    kv = KVCache(10, block_size=4)
    compute(kv, first := make_request("a", range(9)))
    kv.release(first)
    before = (kv.pool.free_blocks(), kv.tables())
    assert len(kv.match(make_request("b", range(9))).blocks) == 2
    assert (kv.pool.free_blocks(), kv.tables()) == before


def test_every_miss_has_a_reason() -> None:
    kv = KVCache(3, block_size=4)
    assert kv.match(make_request("s", range(4))).miss is Miss.TOO_SHORT
    assert kv.match(make_request("n", range(9))).miss is Miss.NEVER_SEEN
    compute(kv, first := make_request("a", range(9)))
    kv.release(first)
    compute(kv, other := make_request("b", range(100, 112)))  # takes all three blocks
    kv.release(other)
    assert kv.match(make_request("c", range(9))).miss is Miss.EVICTED
    off = KVCache(3, block_size=4, prefix_caching=False)
    assert off.match(make_request("d", range(9))).miss is Miss.DISABLED


def test_a_different_salt_never_matches() -> None:
    kv = KVCache(10, block_size=4)
    compute(kv, make_request("a", range(9), salt="tenant-1"))
    assert kv.match(make_request("b", range(9), salt="tenant-1")).blocks
    assert not kv.match(make_request("c", range(9), salt="tenant-2")).blocks
    assert not kv.match(make_request("d", range(9))).blocks


def test_digests_of_a_waiting_request_are_computed_only_as_far_as_it_matches() -> None:
    kv = KVCache(10, block_size=4)
    compute(kv, make_request("a", range(9)))
    waiting = make_request("b", [*range(4), *range(50, 400)])
    assert len(kv.match(waiting).blocks) == 1
    assert len(waiting.block_digests) == 2


def test_equal_digests_with_different_tokens_are_not_a_hit() -> None:
    """Tokens are compared in case of a hash collision."""
    kv = KVCache(10, block_size=4)
    compute(kv, first := make_request("a", range(9)))
    forged = make_request("b", range(50, 59))
    forged.block_digests.extend(first.block_digests)
    assert kv.match(forged).blocks == ()


def test_the_tail_is_evicted_before_the_head() -> None:
    kv = KVCache(4, block_size=4)
    compute(kv, first := make_request("a", range(16)))
    kv.release(first)
    assert kv.pool.free_blocks() == [3, 2, 1, 0]
    compute(kv, make_request("b", range(100, 107)))  # needs two blocks
    assert kv.match(make_request("c", range(16))).blocks == (0, 1)


def test_the_same_tokens_computed_twice_are_indexed_once() -> None:
    kv = KVCache(10, block_size=4)
    first, second = make_request("a", range(8)), make_request("b", range(8))
    for request in (first, second):  # both are admitted before either has computed anything
        kv.attach(request, kv.match(request))
    compute(kv, first)
    compute(kv, second)
    assert len(kv.index) == 2
    assert not set(kv.table(first)) & set(kv.table(second))


def test_a_fork_shares_the_partly_filled_block_until_the_first_write() -> None:
    kv = KVCache(10, block_size=4)
    parent, child = make_request("p", range(6)), make_request("c", range(6))
    compute(kv, parent)
    assert list(kv.table(parent)) == [0, 1]
    kv.fork(parent, child, num_tokens=5)
    assert list(kv.table(child)) == [0, 1]
    assert kv.num_free == 8
    assert kv.reserve(child, 1) == (BlockCopy(source=1, target=2),)
    assert list(kv.table(child)) == [0, 2]
    assert list(kv.table(parent)) == [0, 1]
    assert [kv.pool.references(block) for block in (0, 1, 2)] == [2, 1, 1]
    parent.append(99)
    assert kv.reserve(parent, 1) == ()  # sole owner again: no copy


def test_the_block_that_was_partly_filled_at_a_fork_is_indexed_once_it_is_full() -> None:
    kv = KVCache(10, block_size=4)
    parent, child = make_request("p", range(6)), make_request("c", range(6))
    compute(kv, parent)
    kv.fork(parent, child, num_tokens=6)
    for token in (98, 99):
        child.append(token)
        compute(kv, child, 1)
    assert kv.match(make_request("d", [*range(6), 98, 99, 100])).blocks == tuple(kv.table(child))


def test_the_parent_copies_too_if_it_writes_first() -> None:
    kv = KVCache(10, block_size=4)
    parent, child = make_request("p", range(6)), make_request("c", range(6))
    compute(kv, parent)
    kv.fork(parent, child, num_tokens=6)
    parent.append(99)
    assert kv.reserve(parent, 1) == (BlockCopy(source=1, target=2),)
    child.append(98)
    assert kv.reserve(child, 1) == ()


def test_a_failed_reservation_changes_nothing() -> None:
    kv = KVCache(2, block_size=4)
    request = make_request("a", range(12))
    kv.attach(request, kv.match(request))
    assert kv.reserve(request, 12) is None
    assert kv.num_free == 2
    assert list(kv.table(request)) == []


def test_generated_tokens_are_indexed_like_prompts() -> None:
    kv = KVCache(10, block_size=4)
    compute(kv, request := make_request("a", [1, 2, 3]))
    for token in (4, 5):
        request.append(token)
        compute(kv, request, 1)
    kv.release(request)
    assert kv.match(make_request("b", [1, 2, 3, 4, 5])).blocks == (0,)

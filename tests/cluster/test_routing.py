"""The router that the cluster and the simulator share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.router import (
    BLOCK_SIZE,
    FIRST_ESTIMATE,
    OUTPUT_COST,
    PrefixMap,
    ReplicaLoads,
    Route,
    RoutedRequest,
    Router,
    prefix_keys,
    prefix_lengths,
)
from chairlift.errors import InvalidParameter
from tests.repeatable import examples

ROOM = 100_000


def make_router(policy: str, num_replicas: int = 2, room: int = ROOM) -> Router:
    router = Router(policy)
    for index in range(num_replicas):
        router.add(f"replica-{index}", room)
    return router


def request(tokens: list[int], max_output: int | None = 10) -> RoutedRequest:
    return RoutedRequest(len(tokens), max_output, prefix_keys(tokens))


def prompt(group: int, shared: int, own: int, seed: int) -> list[int]:
    """A prompt whose first `shared` tokens are those of its group."""
    rng = random.Random(seed)
    return [1000 + group] * shared + [rng.randrange(10**6, 10**9) for _ in range(own)]


def test_keys_are_equal_exactly_as_far_as_prompts_are() -> None:
    one, other = prefix_keys([5] * 1000), prefix_keys([5] * 300 + [6] * 700)
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert same == [key.num_tokens <= 300 for key in one]
    assert all(key.num_tokens % BLOCK_SIZE == 0 for key in one)


def test_adapters_and_salts_have_keys_of_their_own() -> None:
    tokens = list(range(200))
    variants = [
        prefix_keys(tokens, adapter=adapter, salt=salt) for adapter in ("", "a", "ab") for salt in ("", "b", "ab")
    ]
    assert len({keys[0].digest for keys in variants}) == len(variants)


@given(st.integers(0, 200_000))
def test_lengths_of_keys_are_few_and_overlook_at_most_a_fifth(num_tokens: int) -> None:
    lengths = list(prefix_lengths(num_tokens))
    assert len(lengths) <= 36
    if num_tokens >= 512:
        assert lengths[-1] > 0.79 * num_tokens


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=200),
    st.sets(st.integers(0, 5)),
)
def test_the_least_loaded_replica_is_found(
    num_replicas: int, changes: list[tuple[int, int]], excluded: set[int]
) -> None:
    loads, expected = ReplicaLoads(), [0] * num_replicas
    for index in range(num_replicas):
        loads.add(index, ROOM)
    left = [index for index in range(num_replicas) if index not in excluded]
    for place, load in changes:
        index = place % num_replicas
        loads.change(index, load - expected[index])
        expected[index] = load
        assert loads[index] == load
        assert loads.least() == expected.index(min(expected))
        if left:
            assert loads.least(excluded) == min(left, key=lambda each: (expected[each], each))


def test_reports_add_the_requests_of_other_routers() -> None:
    loads = ReplicaLoads()
    loads.add("a", 1000)
    loads.change("a", 100, 150)
    loads.report("a", pending=300, held=400)
    assert (loads["a"], loads.free_tokens("a")) == (300, 600)
    loads.change("a", -100, -150)
    assert (loads["a"], loads.free_tokens("a")) == (200, 750)
    loads.report("a", pending=0, held=0)
    assert (loads["a"], loads.free_tokens("a")) == (0, 1000)


@pytest.mark.parametrize("policy", ROUTERS.names())
@settings(max_examples=examples(30, 200))
@given(data=st.data())
def test_loads_return_to_zero(policy: str, data: st.DataObject) -> None:
    """Whatever the order of starts, ends and departures, the account closes."""
    router = make_router(policy, 3)
    routes: list[Route] = []
    for index in range(data.draw(st.integers(1, 30))):
        routes.append(router.route(request(prompt(index % 3, 128, 40, index))))
        for route in routes:
            action = data.draw(st.sampled_from(["", "", "start", "end"]))
            if action == "start":
                router.started(route)
            elif action == "end":
                router.ended(route, 10)
        assert all(router.loads[replica] >= 0 for replica in router.loads)
    for route in routes:
        router.ended(route)
        router.ended(route)  # a second ending changes nothing
    assert [router.loads[replica] for replica in router.loads] == [0, 0, 0]
    assert all(router.loads.free_tokens(replica) == ROOM for replica in router.loads)
    assert not any(map(router.loads.num_open, router.loads))


def test_a_view_of_a_text_has_the_keys_of_its_numbers() -> None:
    view = memoryview(random.Random(5).randbytes(4 * 1000)).cast("I")
    assert prefix_keys(view) == prefix_keys(view.tolist())
    assert len(prefix_keys(view)) > 5


def test_routers_that_share_replicas_choose_the_better_of_two() -> None:
    loads = ReplicaLoads()
    for replica in range(10):
        loads.add(replica, ROOM)
        loads.change(replica, 100 * replica)
    assert {loads.least() for _ in range(50)} == {0}
    loads.draw = random.Random(1)
    chosen = [loads.least({0}) for _ in range(500)]
    assert set(chosen) == set(range(1, 9)), "never the most loaded one"
    assert chosen.count(1) > chosen.count(4) > chosen.count(8)
    assert loads.least(set(range(9))) == 9


def test_round_robin_takes_turns_and_skips_excluded_replicas() -> None:
    router = make_router("round-robin", 3)
    asked = request([1] * 10)
    assert [router.route(asked).replica for _ in range(4)] == ["replica-0", "replica-1", "replica-2", "replica-0"]
    assert all(router.route(asked, excluded={"replica-1"}).replica != "replica-1" for _ in range(5))


def test_least_loaded_counts_prompts_until_they_are_computed() -> None:
    router = make_router("least-loaded")
    long, short = router.route(request([1] * 500)), router.route(request([2] * 100))
    assert long.replica != short.replica
    assert router.loads[long.replica] == 500 + 10 * OUTPUT_COST
    router.started(long)
    assert router.loads[long.replica] == 10 * OUTPUT_COST
    assert router.route(request([3] * 10)).replica == long.replica


def test_new_tokens_batch_weighs_what_must_be_computed_with_the_number_of_requests() -> None:
    """A replica with little to compute for many requests, and one with more to compute for a single one."""
    for policy, expected in (("prefix-affine", "many"), ("new-tokens-batch", "one")):
        router = Router(policy)
        for replica in ("many", "one"):
            router.add(replica, ROOM)
        for _ in range(9):
            router.loads.change("many", 10, 20)
        router.loads.change("one", 300, 300)
        assert [router.loads.num_open(replica) for replica in ("many", "one")] == [9, 1]
        assert router.route(request([1] * 40)).replica == expected


def test_requests_of_other_routers_count_by_their_tokens() -> None:
    loads = ReplicaLoads()
    loads.add("a", 1000)
    loads.report("a", pending=50, held=50)
    assert loads.num_open("a") == 1
    loads.change("a", 100, 100)
    loads.report("a", pending=400, held=400)
    assert loads.num_open("a") == 4


def test_the_expected_output_follows_what_requests_generate() -> None:
    router = make_router("least-loaded", 1)
    first = router.route(RoutedRequest(10))
    assert first.output_cost == OUTPUT_COST * FIRST_ESTIMATE
    for _ in range(500):
        router.ended(router.route(RoutedRequest(10)), 20)
    assert router.route(RoutedRequest(10)).output_cost == OUTPUT_COST * 20
    assert router.route(RoutedRequest(10, 5)).output_cost == OUTPUT_COST * 5


def test_requests_with_a_common_prefix_go_to_one_replica_and_groups_are_spread() -> None:
    router = make_router("prefix-affine", 4)
    homes: dict[int, set[object]] = {}
    for index in range(80):
        group = index % 8
        route = router.route(request(prompt(group, 512, 60, index)))
        homes.setdefault(group, set()).add(route.replica)
        router.started(route)
        router.ended(route, 10)
    assert all(len(found) == 1 for found in homes.values())
    assert {len([g for g, found in homes.items() if replica in found]) for replica in router.loads} == {2}


def test_a_hot_prefix_is_spread_as_soon_as_waiting_costs_more_than_computing_it_again() -> None:
    router = make_router("prefix-affine", 2)
    open_routes = [router.route(request(prompt(0, 512, 60, index))) for index in range(40)]
    loads = [router.loads[replica] for replica in router.loads]
    assert max(loads) <= 1.5 * min(loads)
    # From then on both hold the prefix, and neither computes it again.
    assert all(route.prompt_cost <= 572 - 400 for route in open_routes[-10:])


def test_a_longer_match_elsewhere_beats_a_shared_system_prompt() -> None:
    router = make_router("prefix-affine", 2)
    system = [7] * 256
    first, second = system + [1] * 2000, system + [2] * 2000
    homes = [router.route(request(tokens)) for tokens in (first, second)]
    assert homes[0].replica != homes[1].replica
    for route in homes:
        router.started(route)
        router.ended(route, 10)
    for tokens, home in ((second, homes[1]), (first, homes[0])):
        assert router.route(request([*tokens, 3])).replica == home.replica


def test_a_replica_without_free_memory_is_avoided() -> None:
    router = make_router("prefix-affine", 2, room=4000)
    route = router.route(request(prompt(0, 1000, 10, 0)))
    router.started(route)
    assert router.route(request(prompt(0, 1000, 200, 1))).replica == route.replica
    router.loads.report(route.replica, pending=0, held=4000)
    assert router.route(request(prompt(0, 1000, 900, 2))).replica != route.replica


def test_the_map_of_prefixes_is_bounded_by_the_caches() -> None:
    found = PrefixMap()
    found.add("a", 10_000)
    keys = [prefix_keys([index] * 2000) for index in range(50)]
    for each in keys:
        found.record("a", each, 2000)
    assert len(found) <= 5 * len(keys[0])
    assert found.num_held("a", keys[0]) == 0
    assert found.num_held("a", keys[-1]) == keys[-1][-1].num_tokens
    found.remove("a")
    assert len(found) == 0
    assert list(found.holders(keys[-1])) == []


def test_the_tail_of_a_prompt_is_forgotten_before_its_head() -> None:
    found = PrefixMap()
    found.add("a", 3000)
    old = prefix_keys([1] * 2000)
    found.record("a", old, 2000)
    found.record("a", prefix_keys([2] * 1500), 1500)
    assert 0 < found.num_held("a", old) <= 1500


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="unknown router 'random'; choose from least-loaded, new-tokens-batch"):
        Router("random")

"""Orderings: the order of admission, the choice of victims, and starvation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.events import RequestAdmitted, RequestPreempted
from chairlift.core.integrity import check_quiescent
from chairlift.core.lengths import OutputLengths
from chairlift.core.orderings.base import make_ordering
from chairlift.core.orderings.fair import FairOrdering, parse_weights
from chairlift.core.request import Ending, FinishReason
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.errors import InvalidParameter
from tests.core.driving import events_of, make_request, make_scheduler, run_plan, run_to_end, shape, step
from tests.repeatable import examples


def submit(scheduler: Scheduler, name: str, prompt: int | Sequence[int] = 3, new: int = 2, **options: object) -> None:
    scheduler.submit(make_request(name, prompt, new, **options), 0.0)


def admission_order(scheduler: Scheduler) -> list[str]:
    run_to_end(scheduler)
    check_quiescent(scheduler)
    return [event.request_id for event in events_of(scheduler, RequestAdmitted)]


def running_ids(scheduler: Scheduler) -> list[str]:
    return [request.id for request in scheduler.running]


# ---- claims ---------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    for name, priority in (("a", 9), ("b", -1), ("c", 0)):
        submit(scheduler, name, priority=priority)
    assert admission_order(scheduler) == ["a", "b", "c"]


def test_lower_priorities_are_admitted_first_and_equal_ones_in_order() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", -3), ("d", 0)):
        submit(scheduler, name, priority=priority)
    assert admission_order(scheduler) == ["c", "b", "d", "a"]


def test_the_request_with_the_least_work_is_admitted_first() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="shortest")
    for name, prompt, new in (("a", 10, 10), ("b", 17, 2), ("c", 2, 17), ("d", 5, 5)):
        submit(scheduler, name, prompt, new)
    assert admission_order(scheduler) == ["d", "b", "c", "a"]


def test_a_short_prompt_overtakes_a_long_one_that_came_a_little_earlier() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="boost")
    for name, prompt, arrival in (("old", 40, 0.0), ("long", 40, 20.0), ("short", 4, 30.0), ("late", 4, 60.0)):
        submit(scheduler, name, prompt, arrival=arrival)
    # Ten times as short is as much as 23 seconds earlier: enough to pass one that came 10 seconds before, not 30.
    assert admission_order(scheduler) == ["old", "short", "long", "late"]


def test_the_request_with_the_longest_cached_prefix_is_admitted_first() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="cached")
    text = list(range(500, 540))
    submit(scheduler, "first", text)
    run_to_end(scheduler)
    for name, prompt in (("new", range(900, 930)), ("some", text[:20]), ("most", text), ("all", text)):
        submit(scheduler, name, list(prompt))
    assert admission_order(scheduler) == ["first", "most", "all", "some", "new"]


def test_shortest_goes_by_the_lengths_of_a_tenant_once_enough_are_known() -> None:
    lengths = OutputLengths()
    scheduler = make_scheduler(max_batch_requests=1, order="shortest", lengths=lengths)

    def order(round_number: int) -> list[str]:
        submit(scheduler, f"brief{round_number}", new=30, tenant="brief")
        submit(scheduler, f"long{round_number}", new=25, tenant="long")
        return admission_order(scheduler)

    assert order(0) == ["long0", "brief0"]  # by max_new_tokens
    for tenant, length in (("brief", 2), ("long", 20)):
        for index in range(8):
            submit(scheduler, f"{tenant}-{index}", new=length, tenant=tenant)
    admission_order(scheduler)
    assert order(1) == ["brief1", "long1"]


def test_a_request_is_expected_to_be_as_long_as_longer_ones_were() -> None:
    lengths = OutputLengths()
    for index, length in enumerate((1, 2, 3, 4, 10, 20, 30, 40)):
        assert lengths.remaining(make_request("asks", 3, 50)) is None
        done = make_request(f"r{index}", 3, length)
        done.extend([0] * length)
        lengths.ended(done, Ending(FinishReason.LENGTH))
        lengths.ended(done, Ending(FinishReason.CANCELLED))  # says nothing about the length
    asks = make_request("asks", 3, 33)
    assert lengths.remaining(asks) == 10
    asks.extend([0] * 10)
    assert lengths.remaining(asks) == 20  # of 20, 30 and 40
    asks.extend([0] * 20)
    assert lengths.remaining(asks) == 3  # at most what is left
    # Two requests of 3 known tokens that generate 10 each need 2 x 4 blocks of 4 tokens.
    pair = [make_request(name, 3, 50) for name in "ab"]
    assert lengths.most_blocks(pair, 4) == 8


def test_an_urgent_request_takes_the_slot_of_one_that_is_less_urgent() -> None:
    for takes_slots in (False, True):
        scheduler = make_scheduler(max_batch_requests=2, order="priority", takes_slots=takes_slots)
        for name, priority in (("usual", 1), ("later", 5), ("urgent", 0), ("equal", 1)):
            submit(scheduler, name, new=6, priority=priority)
            step(scheduler)
        assert running_ids(scheduler) == (["usual", "urgent"] if takes_slots else ["usual", "later"])
        run_to_end(scheduler)
        check_quiescent(scheduler)


def test_fair_cached_lets_the_requests_of_a_tenant_follow_each_other_for_a_round() -> None:
    """Two tenants with long prefixes, of which the cache has room for one."""
    admitted = {}
    for order in ("fair", "fair-cached"):
        scheduler = make_scheduler(num_blocks=40, max_batch_requests=1, order=order)
        for index in range(6):
            for tenant, first in (("a", 1000), ("b", 5000)):
                prompt = [*range(first, first + 100), 20_000 + index, *range(9)]
                submit(scheduler, f"{tenant}{index}", prompt, tenant=tenant)
        admitted[order] = "".join(name[0] for name in admission_order(scheduler))
    assert admitted == {"fair": "ab" * 6, "fair-cached": "a" * 6 + "b" * 6}


@settings(max_examples=examples(15, 200), deadline=None)
@given(
    order=st.sampled_from(["fair", "fair-cached"]),
    slots=st.integers(1, 4),
    burst=st.sampled_from([0.0, 50.0, 300.0]),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8)), min_size=3, max_size=3),
)
def test_what_two_tenants_that_always_wait_were_served_differs_by_a_bound(
    order: str, slots: int, burst: float, lengths: list[tuple[int, int]]
) -> None:
    """By no more than the burst and what a tenant may be served at once: a prompt, and the output of all slots."""
    scheduler = make_scheduler(200, max_batch_requests=slots, order=order, max_overtakes=10**6)
    fair = scheduler.ordering
    assert isinstance(fair, FairOrdering)
    fair.BURST = burst  # type: ignore[misc]
    for index in range(25):
        for tenant, (prompt, new) in zip("abc", lengths, strict=True):
            submit(scheduler, f"{tenant}{index}", [ord(tenant), *range(prompt)], new, tenant=tenant)
    most = burst + max(prompt + 1 for prompt, _ in lengths) + slots * max(new for _, new in lengths)
    for _ in range(60):
        scheduler.apply(run_plan(scheduler.schedule(0.0)), 0.0)
        waiting = {request.tenant for request in scheduler.waiting}
        served = [fair.served(tenant) for tenant in waiting]
        assert not served or max(served) - min(served) <= most


@pytest.mark.parametrize(
    ("order", "victim"), [("fcfs", "c"), ("priority", "b"), ("shortest", "a"), ("boost", "b"), ("fair", "b")]
)
def test_the_last_request_by_the_order_is_preempted(order: str, victim: str) -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, order=order, prefix_caching=False)
    # b's tenant is charged for the most tokens.
    submit(scheduler, "a", prompt=4, new=19, priority=0, tenant="x")
    submit(scheduler, "b", prompt=8, new=12, priority=7, tenant="y")
    submit(scheduler, "c", prompt=4, new=15, priority=3, tenant="z")
    preempted: list[str] = []
    while not preempted:
        step(scheduler)
        preempted = [event.request_id for event in events_of(scheduler, RequestPreempted)]
    assert preempted == [victim]
    run_to_end(scheduler)
    check_quiescent(scheduler)


# ---- passing over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["priority", "shortest"])
def test_no_request_is_passed_over_more_often_than_allowed(order: str) -> None:
    """A stream of requests with better claims would otherwise keep it waiting forever."""
    scheduler = make_scheduler(max_batch_requests=1, order=order, max_overtakes=5)
    submit(scheduler, "first", new=1, priority=9)
    submit(scheduler, "waiting", prompt=20, new=9, priority=9)
    for index in range(40):
        submit(scheduler, f"urgent{index}", prompt=2, new=1, priority=-1)
    # Each of the two was passed over five times while it was the oldest.
    order = admission_order(scheduler)
    assert order.index("first") == 5
    assert order.index("waiting") == 11


def test_many_new_tenants_do_not_starve_an_old_one() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="fair", max_overtakes=5)
    submit(scheduler, "first", prompt=20, new=4, tenant="old")
    step(scheduler)
    submit(scheduler, "waiting", prompt=20, new=4, tenant="old")
    for index in range(40):
        submit(scheduler, f"new{index}", prompt=2, new=1, tenant=f"tenant {index}")
    # Each new tenant was served less than the old one: without the limit, all 40 would be admitted first.
    assert admission_order(scheduler).index("waiting") <= 7


def test_a_starved_request_is_not_preempted_for_better_claims() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, order="priority", max_overtakes=1, prefix_caching=False)
    starved = make_request("starved", 4, new=12, priority=5)
    starved.starved = True
    scheduler.submit(starved, 0.0)
    step(scheduler)
    submit(scheduler, "urgent", prompt=4, new=12, priority=0)
    run_to_end(scheduler)
    assert {event.request_id for event in events_of(scheduler, RequestPreempted)} == {"urgent"}


def test_a_request_that_lacks_memory_is_passed_over_but_not_forever() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4, max_overtakes=3, prefix_caching=False)
    submit(scheduler, "holder", prompt=16, new=12)
    step(scheduler)
    submit(scheduler, "large", prompt=30, new=2)
    for index in range(6):
        submit(scheduler, f"small{index}", prompt=3, new=1)
    assert [name for name, _, _ in shape(step(scheduler))] == ["holder", "small0", "small1", "small2"]
    # Three requests have passed it. No other is admitted until it fits.
    assert scheduler.why_waiting("large") is WaitReason.MEMORY
    assert scheduler.why_waiting("small3") is WaitReason.TURN
    assert shape(step(scheduler)) == [("holder", 17, 1)]
    assert admission_order(scheduler)[-4:] == ["large", "small3", "small4", "small5"]


def test_with_fcfs_a_smaller_request_passes_one_that_lacks_memory() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    submit(scheduler, "holder", prompt=12, new=8)
    step(scheduler)
    submit(scheduler, "large", prompt=20, new=2)
    submit(scheduler, "small", prompt=3, new=2)
    assert shape(step(scheduler)) == [("holder", 12, 1), ("small", 0, 3)]
    assert scheduler.why_waiting("large") is WaitReason.MEMORY


# ---- reasons --------------------------------------------------------------------------------------------------------


def test_every_waiting_request_has_a_reason_of_its_own() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4, max_batch_tokens=10, max_batch_requests=3)
    submit(scheduler, "a", prompt=8, new=20)
    step(scheduler)
    submit(scheduler, "large", prompt=33, new=2)
    submit(scheduler, "b", prompt=3, new=20)
    submit(scheduler, "c", prompt=7, new=2)
    submit(scheduler, "d", prompt=3, new=2)
    assert {name: scheduler.why_waiting(name) for name in ("large", "d")} == {
        "large": WaitReason.NEXT_STEP,
        "d": WaitReason.NEXT_STEP,
    }
    assert shape(step(scheduler)) == [("a", 8, 1), ("b", 0, 3), ("c", 0, 6)]
    assert scheduler.why_waiting("large") is WaitReason.MEMORY
    assert scheduler.why_waiting("b") is None
    assert scheduler.why_waiting("d") is WaitReason.SLOTS
    submit(scheduler, "late", prompt=3)
    assert scheduler.why_waiting("late") is WaitReason.NEXT_STEP


# ---- sharing the prefill budget -------------------------------------------------------------------------------------


def test_a_long_prompt_alone_gets_the_whole_budget() -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    submit(scheduler, "long", prompt=40)
    assert [shape(step(scheduler)) for _ in range(3)] == [[("long", 0, 16)], [("long", 16, 16)], [("long", 32, 8)]]


def test_short_prompts_share_the_budget_with_a_long_one() -> None:
    scheduler = make_scheduler(num_blocks=200, max_batch_tokens=16)
    submit(scheduler, "long", prompt=100, new=1)
    step(scheduler)
    for index in range(3):
        submit(scheduler, f"s{index}", prompt=6, new=1)
    assert shape(step(scheduler)) == [("long", 16, 8), ("s0", 0, 6), ("s1", 0, 2)]
    # s1 is the shortest now; the rest goes to the next one.
    assert shape(step(scheduler)) == [("long", 24, 8), ("s1", 2, 4), ("s2", 0, 4)]
    assert shape(step(scheduler)) == [("long", 32, 14), ("s2", 4, 2)]


def test_prompts_of_equal_length_are_computed_one_after_the_other() -> None:
    """Sharing equally would delay all of them."""
    scheduler = make_scheduler(max_batch_tokens=8)
    for name in "abc":
        submit(scheduler, name, prompt=12, new=1)
    shapes = [shape(step(scheduler)) for _ in range(4)]
    assert shapes == [[("a", 0, 8)], [("a", 8, 4), ("b", 0, 4)], [("b", 4, 8)], [("c", 0, 8)]]


def test_two_long_prompts_share_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=200, max_batch_tokens=16)
    submit(scheduler, "x", prompt=100, new=1)
    step(scheduler)
    submit(scheduler, "y", prompt=60, new=1)
    assert shape(step(scheduler)) == [("x", 16, 8), ("y", 0, 8)]
    assert shape(step(scheduler)) == [("x", 24, 8), ("y", 8, 8)]


def test_a_better_claim_gets_the_whole_budget() -> None:
    scheduler = make_scheduler(num_blocks=200, max_batch_tokens=16, order="priority")
    submit(scheduler, "batch", prompt=20, new=1, priority=1)
    step(scheduler)
    submit(scheduler, "urgent", prompt=40, new=1, priority=0)
    # Although it is longer than the rest of the other.
    assert [shape(step(scheduler)) for _ in range(3)] == [
        [("urgent", 0, 16)],
        [("urgent", 16, 16)],
        [("urgent", 32, 8), ("batch", 16, 4)],
    ]


# ---- fair sharing ---------------------------------------------------------------------------------------------------


def test_tenants_take_turns() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="fair")
    for index in range(4):
        submit(scheduler, f"a{index}", tenant="a")
    for index in range(2):
        submit(scheduler, f"b{index}", tenant="b")
    assert admission_order(scheduler) == ["b0", "a0", "b1", "a1", "a2", "a3"]


def test_a_tenant_of_twice_the_weight_is_admitted_twice_as_often() -> None:
    scheduler = make_scheduler(max_batch_requests=1, order="fair", weights={"a": 2})
    for tenant in "ab":
        for index in range(6):
            submit(scheduler, f"{tenant}{index}", tenant=tenant)
    order = admission_order(scheduler)
    assert sum(name.startswith("a") for name in order[:9]) == 6


def test_one_tenant_does_not_take_all_free_slots_of_a_step() -> None:
    scheduler = make_scheduler(max_batch_requests=4, order="fair")
    for index in range(4):
        submit(scheduler, f"a{index}", tenant="a")
    for index in range(4):
        submit(scheduler, f"b{index}", tenant="b")
    step(scheduler)
    assert sorted(running_ids(scheduler)) == ["a0", "a1", "b0", "b1"]


def test_a_tenant_without_a_slot_takes_one_from_the_tenant_with_the_most() -> None:
    scheduler = make_scheduler(max_batch_requests=4, order="fair")
    for index in range(6):
        submit(scheduler, f"a{index}", new=30, tenant="a")
    step(scheduler)
    assert running_ids(scheduler) == ["a0", "a1", "a2", "a3"]
    submit(scheduler, "b0", new=30, tenant="b")
    step(scheduler)
    assert running_ids(scheduler) == ["a0", "a1", "a2", "b0"]
    for index in range(1, 4):
        submit(scheduler, f"b{index}", new=30, tenant="b")
    while running_ids(scheduler) == ["a0", "a1", "a2", "b0"]:
        step(scheduler)  # until b was served less than a again
    assert running_ids(scheduler) == ["a0", "a1", "b0", "b1"]  # two each, which is balanced
    for _ in range(5):
        step(scheduler)
    assert running_ids(scheduler) == ["a0", "a1", "b0", "b1"]
    run_to_end(scheduler)
    check_quiescent(scheduler)


def test_no_request_is_preempted_if_that_frees_too_little_memory() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4, order="fair", prefix_caching=False)
    for index in range(3):
        submit(scheduler, f"a{index}", prompt=8, new=20, tenant="a")
    step(scheduler)
    assert len(running_ids(scheduler)) == 3
    submit(scheduler, "too large", prompt=40, new=2, tenant="b")
    step(scheduler)
    # Preempting two of three requests would not free enough blocks, so none is preempted.
    assert running_ids(scheduler) == ["a0", "a1", "a2"]
    submit(scheduler, "fits", prompt=12, new=2, tenant="c")
    step(scheduler)
    assert "fits" in running_ids(scheduler)
    run_to_end(scheduler)
    check_quiescent(scheduler)


@pytest.mark.parametrize(("burst", "in_a_row"), [(0.0, 0), (100.0, 5)])
def test_an_idle_tenant_earns_a_limited_credit(monkeypatch: pytest.MonkeyPatch, burst: float, in_a_row: int) -> None:
    monkeypatch.setattr(FairOrdering, "BURST", burst)
    scheduler = make_scheduler(max_batch_requests=1, order="fair")
    for index in range(30):
        submit(scheduler, f"a{index}", prompt=20, tenant="a")
    for _ in range(40):
        step(scheduler)
    events_of(scheduler, RequestAdmitted)
    for index in range(10):
        submit(scheduler, f"b{index}", prompt=20, tenant="b")
    tenants = "".join(name[0] for name in admission_order(scheduler))
    assert tenants.startswith("b" * in_a_row + "ab"), "22 tokens each, until the credit is used up"


def test_cached_and_recomputed_tokens_are_not_charged() -> None:
    fair = FairOrdering()
    request = make_request("r", 20, tenant="t")
    fair.arrived(request)
    request.start_from(12)  # a prefix hit
    fair.admitted(request)
    assert fair.claim(request) == 8
    request.append(5)
    fair.appended(request)
    assert fair.claim(request) == 9
    request.start_from(0)  # preempted: all tokens are recomputed
    fair.admitted(request)
    assert fair.claim(request) == 9


def test_counters_of_idle_tenants_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairOrdering, "REMEMBERED_TENANTS", 10)
    fair = FairOrdering()
    steady = make_request("steady", 3, tenant="steady")
    fair.arrived(steady)
    for index in range(100):
        fair.appended(steady)
        request = make_request(f"r{index}", 3, tenant=f"tenant {index}")
        fair.arrived(request)
        fair.finished(request)
    assert len(fair._served) <= 12


def test_names_and_weights_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="boost, cached, edf, fair, fair-cached, fcfs"):
        make_ordering("random")
    with pytest.raises(InvalidParameter, match="tenant_weights: only goes with order fair or fair-cached"):
        make_ordering("fcfs", {"a": 2})
    assert parse_weights(["a=2", "b=c=0.5"]) == {"a": 2.0, "b=c": 0.5}
    for bad in (["a"], ["a="], ["a=x"], ["a=-1"], ["a=nan"], {"a": True}, {"a": float("inf")}):
        with pytest.raises(InvalidParameter, match="tenant_weights"):
            parse_weights(bad)

"""The pool of adapters under random requests, loads, replacements and preemptions."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.adapters import Adapter, AdapterPool, AdapterStatus, AdapterUse, salted
from chairlift.core.integrity import check_accounting
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import StepPlan
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.errors import InvalidParameter
from tests.core.driving import make_scheduler, run_plan
from tests.repeatable import examples


def scheduler_with(pool: AdapterPool, **options: Any) -> Scheduler:
    scheduler = make_scheduler(**options)
    scheduler.adapters = scheduler.state.adapters = pool
    return scheduler


def make_pool(slots: int = 2, num_bytes: int = 100, names: str = "abc", each: int = 10) -> AdapterPool:
    pool = AdapterPool(slots, num_bytes)
    for name in names:
        pool.register(Adapter(name, "1", each))
    return pool


def request(request_id: str, pool: AdapterPool, names: str, prompt: int = 5, output: int = 4) -> Request:
    uses = tuple(AdapterUse(pool.find(name)) for name in names)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    prompt_tokens = list(range(1, prompt + 1))
    return Request(
        request_id, prompt_tokens, params, max_new_tokens=output, arrival=0.0, salt=salted("", uses), adapters=uses
    )


def load_all(pool: AdapterPool) -> list[Adapter]:
    loads = pool.take_loads()
    for adapter in loads:
        pool.loaded(adapter)
    return loads


def run_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    check_accounting(scheduler)
    if plan:
        scheduler.apply(run_plan(plan), 0.0)
        check_accounting(scheduler)
    return plan


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    pool = make_pool()
    scheduler = scheduler_with(pool)
    scheduler.submit(request("first", pool, "a"), 0.0)
    scheduler.submit(request("base", pool, ""), 0.0)
    plan = run_step(scheduler)
    assert [chunk.request.id for chunk in plan.chunks] == ["base"]
    assert scheduler.why_waiting("first") is WaitReason.ADAPTER
    assert [adapter.name for adapter in load_all(pool)] == ["a"]
    assert {chunk.request.id for chunk in run_step(scheduler).chunks} == {"first", "base"}


def test_the_least_recently_used_leaves_and_what_runs_stays() -> None:
    pool = make_pool(slots=2)
    scheduler = scheduler_with(pool)
    for name in "ab":
        scheduler.submit(request(name, pool, name, output=2 if name == "a" else 50), 0.0)
    run_step(scheduler)
    load_all(pool)
    while scheduler.get("a") is not None:
        run_step(scheduler)
    scheduler.submit(request("c", pool, "c"), 0.0)
    run_step(scheduler)
    assert [adapter.name for adapter in load_all(pool)] == ["c"]
    assert pool.find("a").status is AdapterStatus.REGISTERED
    assert pool.find("b").status is AdapterStatus.RESIDENT
    scheduler.submit(request("a2", pool, "a"), 0.0)
    run_step(scheduler)
    assert scheduler.why_waiting("a2") is WaitReason.ADAPTER_MEMORY


def test_one_that_is_passed_over_too_often_comes_next() -> None:
    """Requests of resident adapters pass by a bounded number of times, then memory is freed for the other."""
    pool = make_pool(slots=1)
    scheduler = scheduler_with(pool, max_overtakes=3, max_batch_requests=2)
    scheduler.submit(request("a0", pool, "a", output=8), 0.0)
    run_step(scheduler)
    load_all(pool)
    run_step(scheduler)
    scheduler.submit(request("other", pool, "b"), 0.0)
    admitted = 0
    for number in range(1, 60):
        scheduler.submit(request(f"a{number}", pool, "a", output=8), 0.0)
        run_step(scheduler)
        load_all(pool)
        if scheduler.get("other") is None or scheduler.get("other").status is not Status.WAITING:  # type: ignore[union-attr]
            break
        admitted = sum(1 for each in scheduler.running if each.id.startswith("a"))
    other = scheduler.get("other")
    assert other is None or other.status is not Status.WAITING
    assert other is None or other.times_passed_over <= 3
    assert admitted <= 2


def test_what_can_never_be_resident_is_refused() -> None:
    pool = make_pool(slots=2, num_bytes=25)
    with pytest.raises(InvalidParameter, match="more than 2"):
        pool.check([AdapterUse(pool.find(name)) for name in "abc"])
    with pytest.raises(InvalidParameter, match="twice"):
        pool.check([AdapterUse(pool.find("a"))] * 2)
    with pytest.raises(InvalidParameter, match="takes 26 bytes"):
        pool.register(Adapter("large", "1", 26))
    with pytest.raises(InvalidParameter, match="no adapter 'd'; there are: a, b, c"):
        pool.find("d")
    with pytest.raises(InvalidParameter, match="without adapters"):
        AdapterPool().register(Adapter("a", "1", 1))


def test_salts_differ_by_name_version_weight_and_the_given_salt() -> None:
    one, other = Adapter("a", "1", 1), Adapter("a", "2", 1)
    salts = [
        salted("", ()),
        salted("x", ()),
        salted(salted("", [AdapterUse(one)]), ()),  # a salt that reads like that of an adapter
        salted("\0x", ()),
        salted("", [AdapterUse(one)]),
        salted("x", [AdapterUse(one)]),
        salted("", [AdapterUse(other)]),
        salted("", [AdapterUse(one, 0.5)]),
        salted("", [AdapterUse(Adapter("b", "1", 1))]),
    ]
    assert len(set(salts)) == len(salts)


@settings(max_examples=examples(40, 400), deadline=None)
@given(
    slots=st.integers(1, 3),
    num_bytes=st.sampled_from([20, 35, 100]),
    ahead=st.integers(0, 2),
    blocks=st.integers(6, 20),
    actions=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "b", "c", "d", "ab", "cd", "bd"]), st.integers(1, 12)),
        max_size=60,
    ),
)
def test_random_traffic(
    slots: int, num_bytes: int, ahead: int, blocks: int, actions: list[tuple[int, str, int]]
) -> None:
    """Steps in flight, loads that take any time or fail, replaced names: every request ends once, and none runs
    without its adapter."""
    pool = AdapterPool(slots, num_bytes)
    for index, name in enumerate("abcd"):
        pool.register(Adapter(name, "1", 5 * (1 + index % 3)))
    scheduler = scheduler_with(pool, num_blocks=blocks, block_size=4, max_overtakes=4, kv_class=KVCache)
    in_flight: deque[StepPlan] = deque()
    loading: deque[Adapter] = deque()
    dropped: set[int] = set()
    submitted: list[str] = []
    ended: list[str] = []

    def collect() -> None:
        ended.extend(event.request_id for event in scheduler.drain_events() if hasattr(event, "ending"))
        for slot in pool.take_drops():
            used = {use.adapter.slot for plan in in_flight for chunk in plan.chunks for use in chunk.request.adapters}
            assert slot not in used, "the adapter of a step in flight was evicted"
            dropped.add(slot)
        for adapter in pool.take_loads():
            loading.append(adapter)
        check_accounting(scheduler)

    def step() -> None:
        plan = scheduler.schedule(0.0)
        collect()
        if plan:
            for chunk in plan.chunks:
                for use in chunk.request.adapters:
                    assert use.adapter.status is AdapterStatus.RESIDENT
            in_flight.append(plan)
        while len(in_flight) > (ahead if plan else 0):
            scheduler.apply(run_plan(in_flight.popleft()), 0.0)
            collect()

    for number, (action, names, size) in enumerate(actions):
        if action < 5:
            one = request(f"r{number}", pool, names, prompt=size, output=1 + size % 5)
            try:
                pool.check(one.adapters)
                scheduler.submit(one, 0.0)
                submitted.append(one.id)
            except InvalidParameter:
                continue
        elif action < 7:
            step()
        elif action == 7 and loading:
            pool.loaded(loading.popleft())
        elif action == 8 and loading:
            adapter = loading.popleft()
            pool.failed(adapter)
            scheduler.finish_users(adapter, Ending(FinishReason.ERROR, "no file"), 0.0)
        elif action == 9:
            if submitted and size % 2:
                scheduler.finish(submitted[size % len(submitted)], Ending(FinishReason.CANCELLED), 0.0)
            else:
                pool.register(Adapter("abcd"[size % 4], str(number), 5))
        collect()
    for _ in range(400):
        if not scheduler.has_work and not in_flight:
            break
        while loading:
            pool.loaded(loading.popleft())
        step()
    assert not scheduler.has_work
    assert sorted(ended) == sorted(submitted), "every request has one ending"
    assert all(adapter.is_idle for adapter in pool.in_memory)

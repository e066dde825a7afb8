"""Beam searches among other requests in a small batch: blocks are conserved, shared blocks are never written, and every
search that is not cancelled finds what it would have found alone."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.events import RequestPreempted
from chairlift.core.integrity import check_accounting, check_plan, check_quiescent, check_shared_prefixes
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.plan import StepPlan
from chairlift.core.request import Ending, FinishReason, Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.errors import InvalidParameter
from tests.beam.fake_model import run_plan, submit_beams
from tests.core.driving import make_request, make_scheduler, with_states
from tests.core.memory_model import MemoryModel

Found = list[tuple[list[int], FinishReason]]


def endings(members: list[Request]) -> Found:
    return [(list(member.output), member.ending.reason) for member in members if member.ending is not None]


def found_alone(prompt: list[int], width: int, new: int) -> Found:
    scheduler = make_scheduler(num_blocks=400, max_batch_requests=width, prefix_caching=False)
    members = submit_beams(scheduler, "alone", prompt, width, new)
    for _ in range(100):
        if not scheduler.has_work:
            break
        scheduler.apply(run_plan(scheduler.schedule(0.0)), 0.0)
    return endings(members)


class Driver:
    """Plans steps, applies them `depth` steps later, and checks all invariants each time."""

    def __init__(self, scheduler: Scheduler, depth: int = 0) -> None:
        self.scheduler = scheduler
        self.memory = MemoryModel(scheduler.kv.block_size)
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.now = 0.0

    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        check_accounting(self.scheduler)
        if plan:
            check_plan(self.scheduler, plan)
            self.in_flight.append(plan)
        if self.in_flight and (len(self.in_flight) > self.depth or not plan):
            done = self.in_flight.popleft()
            if not self.depth:
                self.memory.run(done)
            self.scheduler.apply(run_plan(done), self.now)
        self.check()

    def interrupt(self) -> None:
        plan = self.scheduler.schedule(self.now)
        for lost in (*self.in_flight, plan):
            self.scheduler.abandon(lost, self.now)
        self.in_flight.clear()
        self.check()

    def check(self) -> None:
        check_accounting(self.scheduler)
        check_shared_prefixes(self.scheduler)

    def run_to_end(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        raise AssertionError("the workload does not end")


JOB = st.tuples(
    st.sampled_from(["beams", "beams", "plain", "step", "step", "step", "cancel", "interrupt"]),
    st.integers(1, 20),  # length of the prompt
    st.integers(1, 9),  # new tokens
    st.integers(2, 4),  # width
    st.integers(0, 1),  # family: prompts of a family share prefixes
)


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "num_blocks": st.integers(16, 40),
            "block_size": st.sampled_from([1, 2, 4]),
            "max_batch_tokens": st.integers(3, 30),
            "max_batch_requests": st.integers(4, 9),
            "prefix_caching": st.booleans(),
            "policy": st.sampled_from(["continuous", "continuous", "static"]),
            "order": st.sampled_from(["fcfs", "shortest", "cached", "fair", "fair-cached"]),
        }
    ),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([0, 20]),
    st.none() | st.integers(5, 30),
    st.lists(JOB, min_size=4, max_size=25),
)
def test_random_workloads(
    options: dict[str, Any], depth: int, slots: int, state_slots: int | None, jobs: list[tuple[Any, ...]]
) -> None:
    scheduler = make_scheduler(
        **options,
        max_delay=0.0 if options["policy"] == "static" else None,
        swap=SwapSpace(slots if state_slots is None else 0),
        kv_class=KVCache if state_slots is None else partial(with_states, num_slots=state_slots, snapshot_interval=4),
    )
    driver = Driver(scheduler, depth)
    searches: list[tuple[list[Request], list[int], int, int]] = []
    for number, (kind, length, new, width, family) in enumerate(jobs):
        prompt = [(family * 7 + i // 3) % 16 for i in range(length)]
        try:
            if kind == "beams":
                members = submit_beams(scheduler, f"b{number}", prompt, width, new, driver.now, tenant="ab"[family])
                searches.append((members, prompt, width, new))
            elif kind == "plain":
                scheduler.submit(make_request(f"p{number}", prompt, new, tenant="ab"[family]), driver.now)
        except InvalidParameter:
            continue  # too large for the KV cache, or too wide for the state slots
        if kind == "cancel" and searches:
            victim = searches[number % len(searches)][0]
            scheduler.finish(victim[-1].id, Ending(FinishReason.CANCELLED), driver.now)
        elif kind == "interrupt":
            driver.interrupt()
        elif kind == "step":
            driver.step()
    driver.run_to_end()
    check_quiescent(scheduler)
    for members, prompt, width, new in searches:
        found = endings(members)
        assert len(found) == width
        if found[0][1] is not FinishReason.CANCELLED:
            assert found == found_alone(prompt, width, new)


def test_preempted_searches_find_the_same() -> None:
    prompt, preemptions = list(range(10)), 0
    scheduler = make_scheduler(num_blocks=21, block_size=2, max_batch_requests=8, prefix_caching=False)
    driver = Driver(scheduler)
    scheduler.submit(make_request("first", 8, 30), 0.0)
    members = submit_beams(scheduler, "search", prompt, 4, 9)
    while scheduler.has_work:
        driver.step()
        preempted = [event for event in scheduler.drain_events() if isinstance(event, RequestPreempted)]
        preemptions += len(preempted)
        for event in preempted:
            assert event.request_id in {member.id for member in members}
            assert not any(scheduler.kv.table(member) for member in members)
    assert preemptions
    assert endings(members) == found_alone(prompt, 4, 9)


def test_all_beams_share_a_batch_with_other_requests_and_share_the_prompt() -> None:
    scheduler = make_scheduler(num_blocks=200, max_batch_requests=8)
    driver = Driver(scheduler)
    one = submit_beams(scheduler, "one", range(12), 3)
    other = submit_beams(scheduler, "other", range(20, 31), 3)
    scheduler.submit(make_request("plain", 5), 0.0)
    driver.step()
    plan = scheduler.schedule(2.0)
    ids = {chunk.request.id for chunk in plan.chunks}
    assert ids == {member.id for member in (*one, *other)} | {"plain"}
    tables = [scheduler.kv.table(member) for member in one]
    assert [table[:3] for table in tables] == [tables[0][:3]] * 3  # 12 prompt tokens in blocks of 4
    assert len({table[3] for table in tables}) == 3
    assert len(plan.copies) == 2  # of the partly filled last block of the prompt, for all but one of the three beams


def test_pruned_beams_release_their_blocks_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=200, block_size=1, max_batch_requests=8, prefix_caching=False)
    driver = Driver(scheduler)
    members = submit_beams(scheduler, "search", range(5), 4, 12)
    pruned = 0
    while scheduler.has_work:
        driver.step()
        if scheduler.has_work:
            prefixes = {tuple(member.tokens[:end]) for member in members for end in range(1, member.num_computed + 1)}
            assert scheduler.kv.pool.num_used == len(prefixes)  # one block per live token
            pruned += len(prefixes) < 5 + 4 * (members[0].num_known - 6)
    assert pruned


def test_what_a_beam_computed_is_found_under_its_own_tokens() -> None:
    """Also after it has taken over the table of another beam, and both have gone on."""
    scheduler = make_scheduler(num_blocks=200, block_size=2, max_batch_requests=8)
    driver = Driver(scheduler)
    members = submit_beams(scheduler, "search", range(5), 4, 12)
    num_checked = 0
    while scheduler.has_work:
        driver.step()
        for member in scheduler.running:
            reader = make_request("reader", [*member.tokens[: member.num_computed], 99])
            assert len(scheduler.kv.match(reader).blocks) == member.num_computed // 2
            num_checked += member.num_computed > members[0].num_prompt + 2
    assert num_checked


def test_a_table_only_grows_unless_its_generation_is_new_or_blocks_are_copied() -> None:
    """An executor that keeps block tables on a device sends only what was added, but for those two cases."""
    scheduler = make_scheduler(num_blocks=200, block_size=1, max_batch_requests=8, prefix_caching=False)
    members = submit_beams(scheduler, "search", range(5), 4, 12)
    sent: dict[str, tuple[int, list[int]]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        for chunk in plan.chunks:
            generation, table = sent.get(chunk.request.id, (-1, []))
            if generation == chunk.generation and not chunk.copies:
                assert list(chunk.table[: len(table)]) == table
            sent[chunk.request.id] = chunk.generation, list(chunk.table)
        scheduler.apply(run_plan(plan), 0.0)
    assert any(member.generation for member in members)


@pytest.mark.parametrize("member", [0, 2])
def test_cancelling_one_completion_ends_the_search_at_once(member: int) -> None:
    scheduler = make_scheduler(max_batch_requests=8)
    driver = Driver(scheduler)
    members = submit_beams(scheduler, "search", range(9), 4)
    driver.step()
    driver.step()
    assert scheduler.finish(members[member].id, Ending(FinishReason.CANCELLED), 3.0)
    driver.step()
    assert not scheduler.has_work
    assert all(one.ending == Ending(FinishReason.CANCELLED) for one in members)
    check_quiescent(scheduler)


def test_a_wide_search_waits_for_its_slots_and_is_not_passed_over_forever() -> None:
    scheduler = make_scheduler(num_blocks=400, max_batch_requests=4, max_overtakes=3)
    driver = Driver(scheduler)
    for number in range(3):
        scheduler.submit(make_request(f"early{number}", 4, 6 + number), 0.0)
    members = submit_beams(scheduler, "search", range(6), 4)
    for number in range(40):
        scheduler.submit(make_request(f"late{number}", 4, 5), 0.0)
    for _ in range(60):
        driver.step()
    assert members[0].ending is not None
    driver.run_to_end()
    check_quiescent(scheduler)


def test_searches_that_cannot_fit_are_refused() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=4, max_batch_requests=4)
    with pytest.raises(InvalidParameter, match="5 beams need a slot each, but there are 4") as slots:
        submit_beams(scheduler, "wide", range(4), 5, 2)
    assert slots.value.parameter == "beam_width"
    with pytest.raises(InvalidParameter, match="4 beams of up to 20 new tokens exceed the KV cache") as memory:
        submit_beams(scheduler, "long", range(8), 4, 20)
    assert memory.value.parameter == "beam_width"
    submit_beams(scheduler, "fits", range(8), 4, 9)  # 2 shared blocks, and 2 for each beam
    Driver(scheduler).run_to_end()

"""Snapshots of recurrent states: where they are taken, who continues from them, and when they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from chairlift.core.events import RequestAdmitted, RequestPreempted
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.kv.prefix_index import Miss
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from tests.beam.fake_model import submit_beams
from tests.core.driving import deterministic_token, events_of, make_request, make_scheduler, run_plan, with_states
from tests.core.memory_model import MemoryModel

BLOCK = 8
SHARED = list(range(2000, 3000))


class Driver:
    """A scheduler with state slots and a model of the memory, which checks every state that is read."""

    def __init__(
        self, num_slots: int = 40, interval: int | None = None, num_blocks: int = 1000, **options: Any
    ) -> None:
        cache = with_states(num_blocks, BLOCK, num_slots=num_slots, snapshot_interval=interval, **options)
        assert cache.states is not None
        self.states = cache.states
        self.scheduler = make_scheduler(max_batch_tokens=2048, kv_class=lambda *_, **__: cache)
        self.memory = MemoryModel(BLOCK)

    def submit(self, name: str, prompt: Sequence[int], new: int = 1, **options: Any) -> Request:
        request = make_request(name, prompt, new, **options)
        self.scheduler.submit(request, 0.0)
        return request

    def run(self) -> dict[str, int]:
        """Run to the end; return how many tokens were computed for each request."""
        computed: dict[str, int] = {}
        while self.scheduler.has_work:
            plan = self.scheduler.schedule(0.0)
            for chunk in plan.chunks:
                computed[chunk.request.id] = computed.get(chunk.request.id, 0) + chunk.count
            self.memory.run(plan)
            self.scheduler.apply(run_plan(plan), 0.0)
            check_accounting(self.scheduler)
        check_quiescent(self.scheduler)
        return computed

    def admitted(self) -> list[RequestAdmitted]:
        return [event for event in self.scheduler.drain_events() if isinstance(event, RequestAdmitted)]


def test_three_requests_compute_their_shared_tokens_once() -> None:
    driver = Driver()
    for number, name in enumerate("abc"):
        driver.submit(name, [*SHARED, *range(100 * number, 100 * number + 20)])
    assert driver.run() == {"a": 1020, "b": 20, "c": 20}
    assert [event.cached_tokens for event in driver.admitted()] == [0, 1000, 1000]


def test_the_first_request_that_diverges_leaves_a_snapshot_for_the_next() -> None:
    driver = Driver()
    computed = {}
    for number, name in enumerate("abc"):
        driver.submit(name, [*SHARED, *range(100 * number, 100 * number + 20)])
        computed |= driver.run()
    assert computed == {"a": 1020, "b": 1020, "c": 20}
    misses = [event.miss for event in driver.admitted()]
    assert misses == [Miss.NEVER_SEEN, Miss.NO_STATE, Miss.NEVER_SEEN]


def test_requests_wait_for_a_snapshot_that_another_one_is_going_to_take() -> None:
    driver = Driver()
    driver.submit("a", [*SHARED, 1])
    driver.run()
    driver.submit("b", [*SHARED[:504], 2, 3])
    driver.submit("c", [*SHARED[:504], 4, 5])
    assert driver.run() == {"b": 506, "c": 2}


def test_snapshots_at_intervals_shorten_what_is_computed_again() -> None:
    driver = Driver(interval=256)
    driver.submit("a", [*SHARED, 1])
    driver.run()
    driver.submit("b", [*SHARED[:600], 2])
    assert driver.run() == {"b": 601 - 512}


def test_snapshots_at_intervals_leave_slots_to_others() -> None:
    driver = Driver(num_slots=10, interval=8)
    for number, name in enumerate("abc"):
        driver.submit(name, [*SHARED, *range(100 * number, 100 * number + 20)])
    assert driver.run() == {"a": 1020, "b": 20, "c": 20}
    assert driver.states.slots.num_evictions == 0


def test_a_prompt_that_comes_again_continues_from_its_last_block() -> None:
    driver = Driver()
    for name in "ab":
        driver.submit(name, SHARED[:100])
    assert driver.run() == {"a": 100, "b": 4}


def test_a_conversation_continues_from_the_end_of_the_last_answer() -> None:
    driver = Driver()
    first = driver.submit("a", SHARED[:20], new=30)
    driver.run()
    assert len(driver.states.snapshots) == 2  # of the prompt, and the newest of the answer
    driver.submit("b", [*first.tokens, 7, 8])
    assert driver.run() == {"b": 52 - 48}


def test_an_evicted_block_takes_its_snapshot_with_it() -> None:
    driver = Driver(num_blocks=16)
    driver.submit("a", SHARED[:100])
    driver.run()
    states = driver.states
    assert len(states.snapshots) == 1
    driver.submit("b", SHARED[500:600])
    driver.run()
    assert len(states.snapshots) == 1
    assert states.slots.num_empty == states.slots.num_blocks - 1


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    driver = Driver(num_slots=3)
    for name, start in (("a", 0), ("b", 100), ("a again", 0), ("c", 200), ("a at last", 0), ("b at last", 100)):
        driver.submit(name, SHARED[start : start + 50])
        driver.run()
    assert [event.cached_tokens for event in driver.admitted()] == [0, 0, 48, 0, 48, 0]


def test_completions_of_one_prompt_start_one_token_behind() -> None:
    driver = Driver(prefix_caching=False)
    params, leader = SamplingParams(max_tokens=5, n=3), None
    for name in ("a", "a#1", "a#2"):
        request = driver.submit(name, SHARED[:100], 5, params=params, leader=leader)
        leader = leader or request
    assert driver.run() == {"a": 104, "a#1": 5, "a#2": 5}


def test_a_completion_that_has_to_wait_for_a_slot_still_shares_the_prompt() -> None:
    driver = Driver(num_slots=4, prefix_caching=False)
    driver.submit("other", SHARED[500:510], 6)
    params, leader = SamplingParams(max_tokens=20, n=3), None
    for name in ("a", "a#1", "a#2"):
        request = driver.submit(name, SHARED[:100], 20, params=params, leader=leader)
        leader = leader or request
    computed = driver.run()
    assert computed == {"other": 15, "a": 119, "a#1": 20, "a#2": 20}


def test_a_preempted_request_resumes_from_its_newest_snapshot() -> None:
    driver = Driver(num_blocks=10)
    first = driver.submit("a", SHARED[:30], new=20)
    second = driver.submit("b", SHARED[500:530], new=20)
    computed = driver.run()
    assert events_of(driver.scheduler, RequestPreempted)
    assert sum(computed.values()) < 2 * 49 + 30
    for request in (first, second):
        alone = make_request("alone", request.prompt)
        for token in request.output:
            assert token == deterministic_token(alone)
            alone.append(token)


def test_slots_that_are_reserved_for_drafts_are_room_for_drafts() -> None:
    driver = Driver(num_slots=6)
    request = driver.submit("a", SHARED[:20], new=8)
    driver.scheduler.apply(run_plan(driver.scheduler.schedule(0.0)), 0.0)
    room = driver.states.draft_room
    assert driver.states.reserve(request, 1 + room) is not None
    assert driver.states.slots.num_free == 0
    assert driver.states.draft_room == room


def test_beams_that_lack_state_slots_are_refused() -> None:
    driver = Driver(num_slots=8)
    with pytest.raises(InvalidParameter, match="4 beams need two state slots each"):
        submit_beams(driver.scheduler, "search", SHARED[:10], 4, 5)
    submit_beams(driver.scheduler, "search", SHARED[:10], 3, 5)

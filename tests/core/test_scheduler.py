from __future__ import annotations

import pytest

from chairlift.core.events import RequestAdmitted, RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.integrity import check_quiescent
from chairlift.core.plan import BAD_LOGITS
from chairlift.core.request import Ending, FinishReason, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import WaitReason
from chairlift.errors import InvalidParameter
from tests.core.driving import (
    deterministic_token,
    events_of,
    make_request,
    make_scheduler,
    run_plan,
    run_to_end,
    shape,
    step,
)


def test_decodes_come_first_and_prefill_fills_the_rest_in_chunks() -> None:
    scheduler = make_scheduler(max_batch_tokens=10)
    scheduler.submit(make_request("a", 4), 0)
    assert shape(step(scheduler)) == [("a", 0, 4)]
    scheduler.submit(make_request("long", 20), 0)
    assert shape(step(scheduler)) == [("a", 4, 1), ("long", 0, 9)]
    scheduler.submit(make_request("b", 5), 0)
    # b is shorter than the rest of the long prompt: they share the budget.
    assert shape(step(scheduler)) == [("a", 5, 1), ("long", 9, 5), ("b", 0, 4)]
    assert shape(step(scheduler)) == [("a", 6, 1), ("long", 14, 6), ("b", 4, 1)]
    assert shape(step(scheduler)) == [("long", 20, 1), ("b", 5, 1)]


def test_prefill_tokens_are_limited_separately() -> None:
    scheduler = make_scheduler(max_batch_tokens=32, max_prefill_tokens=3)
    scheduler.submit(make_request("a", 5), 0)
    scheduler.submit(make_request("b", 4), 0)
    shapes = [shape(plan) for plan in run_to_end(scheduler)]
    assert shapes[:4] == [
        [("a", 0, 3)],
        [("a", 3, 2), ("b", 0, 1)],
        [("a", 5, 1), ("b", 1, 3)],
        [("a", 6, 1), ("b", 4, 1)],
    ]


def test_a_finished_request_frees_its_slot_for_the_next_step() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    scheduler.submit(make_request("a", 3, new=2), 0)
    scheduler.submit(make_request("b", 3, new=1), 0)
    assert shape(step(scheduler)) == [("a", 0, 3)]
    assert scheduler.why_waiting("b") is WaitReason.SLOTS
    assert shape(step(scheduler)) == [("a", 3, 1)]
    assert shape(step(scheduler)) == [("b", 0, 3)]
    check_quiescent(scheduler)


@pytest.mark.parametrize(
    ("params", "tokens", "ending"),
    [
        (SamplingParams(max_tokens=9), [5, 2], Ending(FinishReason.STOP)),
        (SamplingParams(max_tokens=9, stop_token_ids=[7]), [5, 7], Ending(FinishReason.STOP, 7)),
        (SamplingParams(max_tokens=3, ignore_eos=True), [2, 2, 2], Ending(FinishReason.LENGTH)),
        (SamplingParams(max_tokens=2), [5, 2], Ending(FinishReason.STOP)),
    ],
)
def test_tokens_end_requests(params: SamplingParams, tokens: list[int], ending: Ending) -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3, new=params.max_tokens or 0, params=params, eos_ids=frozenset({2}))
    scheduler.submit(request, 0)
    remaining = iter(tokens)
    run_to_end(scheduler, lambda _: next(remaining))
    assert list(request.output) == tokens
    assert request.ending == ending


def test_a_stop_string_takes_precedence_over_length() -> None:
    scheduler = make_scheduler()
    ending = Ending(FinishReason.STOP, "END")
    request = make_request("a", 3, new=2)
    scheduler.submit(request, 0)
    for _ in range(2):
        plan = scheduler.schedule(0)
        scheduler.apply(run_plan(plan), 0, lambda r, token: ending if r.num_output == 2 else None)
    assert request.ending is ending
    check_quiescent(scheduler)


def test_bad_logits_end_one_request_only() -> None:
    scheduler = make_scheduler()
    bad, good = make_request("bad", 3), make_request("good", 3)
    scheduler.submit(bad, 0)
    scheduler.submit(good, 0)
    run_to_end(scheduler, lambda r: BAD_LOGITS if r is bad else deterministic_token(r))
    assert bad.ending is not None
    assert bad.ending.reason is FinishReason.ERROR
    assert good.num_output == 4


def test_requests_can_be_cancelled_while_waiting_running_and_in_flight() -> None:
    scheduler = make_scheduler(max_batch_requests=2)
    for name in "abc":
        scheduler.submit(make_request(name, 3), 0)
    cancelled = Ending(FinishReason.CANCELLED)
    step(scheduler)
    assert scheduler.finish("c", cancelled, 1)
    assert scheduler.finish("a", cancelled, 1)
    plan = scheduler.schedule(2)
    blocks = list(plan.chunks[0].table)
    assert scheduler.finish("b", cancelled, 2)
    # The step in flight may still write b's blocks: they must not be allocated before it is done.
    assert not any(scheduler.kv.pool.is_free(block) for block in blocks)
    assert not scheduler.finish("b", cancelled, 2)
    scheduler.apply(run_plan(plan), 2)
    check_quiescent(scheduler)
    endings = [event.request_id for event in events_of(scheduler, RequestFinished)]
    assert endings == ["c", "a", "b"]


def test_deadlines_end_waiting_and_running_requests() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    scheduler.submit(make_request("a", 3, new=50, deadline=5.0), 0)
    scheduler.submit(make_request("b", 3, new=50, deadline=2.0), 0)
    plans = run_to_end(scheduler)
    finished = events_of(scheduler, RequestFinished)
    assert [(e.request_id, e.time, e.ending.reason) for e in finished] == [
        ("b", 2.0, FinishReason.DEADLINE),
        ("a", 5.0, FinishReason.DEADLINE),
    ]
    assert len(plans) == 6


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(InvalidParameter, match="kv_memory") as refusal:
        scheduler.submit(make_request("big", 14, new=4), 0)
    assert refusal.value.parameter == "prompt"
    scheduler.submit(make_request("fits", 13, new=4), 0)  # 16 computed tokens: the last one is not computed
    run_to_end(scheduler)


def test_ids_are_unique_while_in_use() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 3), 0)
    with pytest.raises(InvalidParameter, match="already in use"):
        scheduler.submit(make_request("a", 3), 0)
    run_to_end(scheduler)
    scheduler.submit(make_request("a", 3), 0)


def test_the_youngest_request_is_preempted_and_loses_no_token() -> None:
    large, small = make_scheduler(num_blocks=100), make_scheduler(num_blocks=8, prefix_caching=False)
    outputs = []
    for scheduler in (large, small):
        requests = [make_request(name, 6, new=12) for name in "abc"]
        for request in requests:
            scheduler.submit(request, 0)
        run_to_end(scheduler)
        check_quiescent(scheduler)
        outputs.append([list(request.output) for request in requests])
    assert outputs[0] == outputs[1]
    preempted = [event.request_id for event in events_of(small, RequestPreempted)]
    assert preempted
    assert "a" not in preempted
    assert not events_of(large, RequestPreempted)


def test_no_request_is_admitted_in_a_step_in_which_memory_ran_out() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, prefix_caching=False)
    scheduler.submit(make_request("a", 4, new=16), 0)
    scheduler.submit(make_request("b", 4, new=16), 0)
    while not events_of(scheduler, RequestPreempted):
        plan = step(scheduler)
    assert [chunk.request.id for chunk in plan.chunks] == ["a"]
    assert scheduler.why_waiting("b") is WaitReason.PREEMPTION


def test_admission_leaves_blocks_for_the_whole_prompts_of_running_requests() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=4, max_batch_tokens=8)
    scheduler.submit(make_request("a", 32), 0)
    scheduler.submit(make_request("b", 12), 0)
    step(scheduler)  # a computed 8 of 32 tokens and holds 2 blocks, but will need 6 more
    step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]


def test_siblings_share_the_prompt_and_copy_on_write() -> None:
    scheduler = make_scheduler(block_size=4)
    leader = make_request("a", range(10), new=3)
    siblings = [make_request(f"a{i}", range(10), new=3, leader=leader) for i in (1, 2)]
    for request in (leader, *siblings):
        scheduler.submit(request, 0)
    assert shape(step(scheduler)) == [("a", 0, 10)]
    assert scheduler.kv.pool.num_used == 3
    plan = scheduler.schedule(1)
    # Each sibling is one token behind: it shares all prompt blocks and copies only the one that it writes to.
    assert shape(plan) == [("a", 10, 1), ("a1", 9, 1), ("a2", 9, 1)]
    assert [len(chunk.copies) for chunk in plan.chunks] == [0, 1, 1]
    tables = scheduler.kv.tables()
    assert tables["a"][:2] == tables["a1"][:2] == tables["a2"][:2]
    assert len({tables[name][2] for name in tables}) == 3
    assert scheduler.kv.pool.num_used == 5
    scheduler.apply(run_plan(plan), 1)
    run_to_end(scheduler)
    check_quiescent(scheduler)


def test_a_sibling_is_admitted_alone_if_its_leader_is_cancelled() -> None:
    scheduler = make_scheduler()
    leader = make_request("a", range(10))
    sibling = make_request("a1", range(10), leader=leader)
    scheduler.submit(leader, 0)
    scheduler.submit(sibling, 0)
    assert scheduler.why_waiting("a1") is WaitReason.SIBLING
    scheduler.finish("a", Ending(FinishReason.CANCELLED), 0)
    assert shape(step(scheduler)) == [("a1", 0, 10)]


def test_siblings_share_with_each_other_if_the_leader_finished() -> None:
    scheduler = make_scheduler(block_size=4, prefix_caching=False)
    leader = make_request("a", range(10), new=3, eos_ids=frozenset({77}))
    siblings = [make_request(f"a{i}", range(10), new=3, leader=leader) for i in (1, 2, 3)]
    for request in (leader, *siblings):
        scheduler.submit(request, 0)
    first = step(scheduler, next_token=lambda r: 77 if r is leader else deterministic_token(r))
    assert shape(first) == [("a", 0, 10)]
    assert shape(step(scheduler)) == [("a1", 0, 10)]
    assert scheduler.why_waiting("a2") is not WaitReason.SIBLING  # a1 has the prompt by now
    assert shape(step(scheduler)) == [("a1", 10, 1), ("a2", 9, 1), ("a3", 9, 1)]
    assert scheduler.kv.pool.num_used == 2 + 3
    run_to_end(scheduler)
    check_quiescent(scheduler)


def test_a_request_waits_for_a_prefix_that_is_being_computed() -> None:
    scheduler = make_scheduler(block_size=4, max_batch_tokens=8)
    shared = list(range(12))
    for name, tail in (("a", [50]), ("b", [60, 61]), ("c", [70])):
        scheduler.submit(make_request(name, [*shared, *tail]), 0)
    scheduler.submit(make_request("other", 3), 0)
    assert shape(step(scheduler)) == [("a", 0, 8)]
    # b and c wait for the shared blocks; the request after them in the queue passes them.
    assert shape(step(scheduler)) == [("a", 8, 5), ("other", 0, 3)]
    assert scheduler.why_waiting("b") is not None
    assert shape(step(scheduler)) == [("a", 13, 1), ("other", 3, 1), ("b", 12, 2), ("c", 12, 1)]
    admitted = {e.request_id: e.cached_tokens for e in events_of(scheduler, RequestAdmitted)}
    assert admitted == {"a": 0, "other": 0, "b": 12, "c": 12}


def test_a_shared_prefix_is_stored_once() -> None:
    scheduler = make_scheduler(num_blocks=300, block_size=16, max_batch_tokens=256)
    for tail in range(3):
        scheduler.submit(make_request(f"r{tail}", [*range(1000), 5000 + tail], new=20), 0)
    peak = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0)
        peak = max(peak, scheduler.kv.pool.num_used)
        scheduler.apply(run_plan(plan), 0)
    # 62 full blocks are shared; each request has 9 more prompt tokens and up to 19 output tokens, in 2 blocks.
    assert peak == 62 + 3 * 2
    check_quiescent(scheduler)


def test_a_request_that_waits_for_a_prefix_is_admitted_if_the_computing_one_is_cancelled() -> None:
    scheduler = make_scheduler(block_size=4, max_batch_tokens=4)
    scheduler.submit(make_request("a", range(20)), 0)
    scheduler.submit(make_request("b", range(20)), 0)
    step(scheduler)
    assert scheduler.why_waiting("b") is WaitReason.PREFIX
    scheduler.finish("a", Ending(FinishReason.CANCELLED), 0)
    assert shape(step(scheduler)) == [("b", 4, 4)]  # the blocks that a computed are shared


def test_a_new_request_does_not_get_an_old_wait_reason() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    scheduler.submit(make_request("a", 3, new=1), 0)
    scheduler.submit(make_request("b", 3, new=1), 0)
    step(scheduler)
    assert scheduler.why_waiting("b") is WaitReason.SLOTS
    run_to_end(scheduler)
    scheduler.submit(make_request("c", 3), 0)
    assert scheduler.why_waiting("c") is WaitReason.NEXT_STEP


def test_a_deadline_does_not_apply_to_a_later_request_with_the_same_id() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 3, new=1, deadline=5.0), 0)
    run_to_end(scheduler)
    again = make_request("a", 3, new=2)
    scheduler.submit(again, 5.0)
    step(scheduler, now=6.0)
    assert again.status is Status.RUNNING


def test_the_same_inputs_give_the_same_schedule_and_events() -> None:
    def run() -> tuple[list[object], list[object]]:
        scheduler = make_scheduler(num_blocks=12, max_batch_tokens=9)
        for i in range(12):
            scheduler.submit(make_request(f"r{i}", 3 + 2 * (i % 5), new=1 + i % 7), 0)
        plans = run_to_end(scheduler)
        return [shape(plan) for plan in plans], scheduler.drain_events()

    assert run() == run()


def test_tokens_are_reported_once_each_in_order() -> None:
    scheduler = make_scheduler(num_blocks=6, prefix_caching=False)
    requests = [make_request(name, 5, new=8) for name in "ab"]
    for request in requests:
        scheduler.submit(request, 0)
    run_to_end(scheduler)
    produced: dict[str, list[int]] = {"a": [], "b": []}
    for event in events_of(scheduler, TokenProduced):
        produced[event.request_id].append(event.token)
    assert produced == {request.id: list(request.output) for request in requests}
    assert all(request.status is Status.FINISHED for request in requests)

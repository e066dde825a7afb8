"""Random workloads with random drafts: whatever is drafted, the tokens are the same, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from chairlift.core.events import DraftsVerified, TokenProduced
from chairlift.core.integrity import check_quiescent
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.proposers.base import LEVELS, Draft, DraftTerms
from tests.core.driving import (
    make_request,
    make_scheduler,
    run_pipelined,
    run_plan,
    run_to_end,
    step,
)
from tests.core.memory_model import MemoryModel
from tests.core.test_properties import SCHEDULERS, FlakyKVCache, Workload
from tests.speculation.drafting import FixedProposer, RandomProposer, continue_deterministically, fixed_length


def speculation(
    length: int | None = 5, seed: int = 0, kind: type[RandomProposer] = RandomProposer
) -> SpeculationController:
    proposer = kind(continue_deterministically, seed=seed)
    return SpeculationController(proposer, draft_length=length)


class SpeculativeWorkload(Workload):
    """The workload of the scheduler's own property tests, with drafts."""

    @initialize(**SCHEDULERS, length=st.integers(0, 7), seed=st.integers(0, 1000))
    def start(self, **options: Any) -> None:
        length, seed = options.pop("length"), options.pop("seed")
        self.scheduler = make_scheduler(
            options["num_blocks"],
            options["block_size"],
            options["tokens"],
            options["prefill"],
            options["slots"],
            options["caching"],
            FlakyKVCache,
            **options["strategy"],
            swap=SwapSpace(options["host_slots"]),
            speculation=speculation(length or None, seed),
        )
        self.kv = self.scheduler.kv
        assert isinstance(self.kv, FlakyKVCache)
        self.kv.failures = random.Random(1)
        self.memory = MemoryModel(options["block_size"])
        self.capacity = options["num_blocks"] * options["block_size"]
        self.now = 0.0
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()
        self.in_flight = None
        self.expected: dict[str, list[int]] = {}


TestSpeculativeWorkload = SpeculativeWorkload.TestCase
TestSpeculativeWorkload.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def outputs(scheduler: Scheduler) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in scheduler.drain_events():
        if isinstance(event, TokenProduced):
            found.setdefault(event.request_id, []).append(event.token)
    return found


def test_right_drafts_save_steps_and_change_nothing() -> None:
    plain, fast = make_scheduler(), make_scheduler(speculation=speculation(kind=FixedProposer))
    for scheduler in (plain, fast):
        scheduler.submit(make_request("a", 10, 31), 0.0)
    many, few = run_to_end(plain), run_to_end(fast)
    assert (len(many), len(few)) == (31, 6)  # one prompt, then five drafts and one token more in each step
    assert outputs(plain) == outputs(fast)
    check_quiescent(fast)


def test_blocks_of_wrong_drafts_are_free_after_the_step() -> None:
    wrong = fixed_length(FixedProposer(lambda request, length: [998] * length), 7)
    scheduler = make_scheduler(num_blocks=20, block_size=2, speculation=wrong)
    request = make_request("a", 5, 12)
    scheduler.submit(request, 0.0)
    freed = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        held = scheduler.kv.pool.num_used
        assert held == scheduler.kv.blocks_for(plan.chunks[0].end)
        scheduler.apply(run_plan(plan), 0.0)
        assert scheduler.kv.pool.num_used == (scheduler.kv.blocks_for(request.num_computed) if scheduler.running else 0)
        freed.append(held - scheduler.kv.pool.num_used)
    assert max(freed[:-1]) >= 3


class ReservingProposer(FixedProposer):
    """Reserves blocks for whole drafts, as a draft model does, and drafts one token only."""

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        assert all(terms.reserve(request) is not None for request in requests)
        return [Draft([998], [LEVELS - 1]) for _ in requests]


def test_blocks_reserved_for_drafts_that_did_not_come_are_free_before_the_step() -> None:
    scheduler = make_scheduler(block_size=2, speculation=speculation(7, kind=ReservingProposer))
    for name in "ab":
        scheduler.submit(make_request(name, 5, 20), 0.0)
    step(scheduler)
    for _ in range(4):
        plan = scheduler.schedule(0.0)
        assert [len(chunk.drafts) for chunk in plan.chunks] == [1, 1]
        assert [len(chunk.table) for chunk in plan.chunks] == [scheduler.kv.blocks_for(c.end) for c in plan.chunks]
        scheduler.apply(run_plan(plan), 0.0)


def test_a_step_that_moves_blocks_to_or_from_host_memory_has_no_drafts_that_could_touch_them() -> None:
    """A proposer reads and writes blocks before the step makes its copies."""
    scheduler = make_scheduler(
        order="fair",
        max_batch_requests=3,
        prefix_caching=False,
        swap=SwapSpace(50),
        speculation=speculation(kind=FixedProposer),
    )
    for name in "abc":
        scheduler.submit(make_request(name, 6, 40, tenant="many"), 0.0)
    step(scheduler)
    assert step(scheduler).num_drafts
    scheduler.submit(make_request("guest", 6, 4, tenant="guest"), 0.0)
    out = step(scheduler)  # the guest takes a slot; there is memory enough
    assert {swap.request.id for swap in out.swap_outs} == {"c"}
    assert not out.num_drafts
    back = next(plan for plan in run_to_end(scheduler) if plan.swap_ins)
    drafts = {chunk.request.id: len(chunk.drafts) for chunk in back.chunks}
    assert drafts["c"] == 0
    assert drafts["a"] > 0


def test_the_prefix_index_never_holds_a_draft() -> None:
    scheduler = make_scheduler(block_size=2, speculation=speculation(seed=5))
    scheduler.submit(make_request("a", 4, 40), 0.0)
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        indexed = len(scheduler.kv.index)
        assert indexed <= plan.chunks[0].start // 2  # nothing that this step is yet to compute
        scheduler.apply(run_plan(plan), 0.0)
    again = make_request("b", list(range(*_prompt_of("a"))) + outputs(scheduler)["a"], 1)
    assert len(scheduler.kv.match(again).blocks) == (again.num_known - 1) // 2  # all accepted tokens are indexed


def _prompt_of(name: str) -> tuple[int, int]:
    prompt = make_request(name, 4).prompt
    return prompt[0], prompt[-1] + 1


def test_drafts_use_only_what_prompts_leave_of_the_budget() -> None:
    scheduler = make_scheduler(max_batch_tokens=8, speculation=speculation(kind=FixedProposer))
    scheduler.submit(make_request("a", 4, 20), 0.0)
    step(scheduler)
    scheduler.submit(make_request("b", 11, 20), 0.0)
    assert [step(scheduler).num_drafts for _ in range(3)] == [0, 8 - 1 - 4, 8 - 2]


def test_no_request_is_preempted_for_a_draft() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, speculation=speculation(kind=FixedProposer))
    for name in "ab":
        scheduler.submit(make_request(name, 4, 3), 0.0)
    plans = run_to_end(scheduler)
    assert max(len(plan.chunks) for plan in plans) == 2
    assert not [event for event in scheduler.drain_events() if type(event).__name__ == "RequestPreempted"]


@pytest.mark.parametrize("seed", range(4))
def test_a_request_with_drafts_in_flight_is_not_planned_ahead(seed: int) -> None:
    plain = make_scheduler(num_blocks=30)
    ahead = make_scheduler(num_blocks=30, speculation=speculation(seed=seed))
    for scheduler in (plain, ahead):
        for index in range(6):
            scheduler.submit(make_request(f"r{index}", 3 + index, 9), 0.0)
    run_to_end(plain)
    run_pipelined(ahead, depth=1)
    assert outputs(plain) == outputs(ahead)


def test_every_verification_is_reported() -> None:
    scheduler = make_scheduler(speculation=speculation(seed=1))
    scheduler.submit(make_request("a", 6, 60), 0.0)
    plans = run_to_end(scheduler)
    reported = [event for event in scheduler.drain_events() if isinstance(event, DraftsVerified)]
    assert [event.proposed for event in reported] == [plan.num_drafts for plan in plans if plan.num_drafts]
    assert sum(event.accepted for event in reported) == 60 - len(plans)

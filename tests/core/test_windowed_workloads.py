"""Random workloads on the scheduler of a model with windows: no block is lost, and every token finds what each group of
layers sees of the tokens before it, with chunks, prefix hits, siblings, drafts, preemption and swaps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from chairlift.core.integrity import check_quiescent
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.kv.windowed_cache import FULL, GroupedCache, Reach, WindowedCache, make_cache
from chairlift.core.plan import PlanBuilder, StepLimits
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.speculation.control.controller import SpeculationController
from tests.core.driving import make_request, make_scheduler, run_pipelined, run_to_end, settled_forecast, step
from tests.core.memory_model import MemoryModel
from tests.core.test_pipelined import outcome, submit_all
from tests.core.test_properties import BUDGET_NAMES, SCHEDULERS, FlakyKVCache, Workload
from tests.repeatable import examples
from tests.speculation.drafting import RandomProposer, continue_deterministically


class FlakyWindowedCache(FlakyKVCache, WindowedCache):
    """Fails some reservations of layers that all have one window."""


class FlakyGroupedCache(FlakyKVCache, GroupedCache):
    """The same for a model with several groups of layers."""


def flaky_cache(
    num_blocks: int, block_size: int, *, reaches: Sequence[Reach], prefix_caching: bool, step_tokens: int
) -> FlakyKVCache:
    first, *beside = reaches
    options: dict[str, Any] = {"prefix_caching": prefix_caching, "step_tokens": step_tokens}
    if beside:
        return FlakyGroupedCache(num_blocks * len(reaches), block_size, beside=beside, **options)
    return FlakyWindowedCache(num_blocks, block_size, reach=first, **options)


WINDOWS = st.builds(Reach, window=st.integers(1, 20)) | st.builds(Reach, chunk=st.integers(1, 20))
REACHES = WINDOWS.map(lambda reach: (reach,)) | st.lists(WINDOWS | st.just(FULL), min_size=1, max_size=3).map(
    lambda beside: (FULL, *beside)
)


class WindowedWorkload(Workload):
    """The workload of the scheduler's own property tests, with groups of layers, and with or without drafts."""

    @initialize(
        **SCHEDULERS,
        budget=st.sampled_from(BUDGET_NAMES),
        reaches=REACHES,
        length=st.integers(0, 5),
        seed=st.integers(0, 1000),
    )
    def start(self, **options: Any) -> None:
        proposer = RandomProposer(continue_deterministically, seed=options["seed"])
        length, reaches = options["length"], options["reaches"]
        self.scheduler = make_scheduler(
            options["num_blocks"],
            options["block_size"],
            options["tokens"],
            options["prefill"],
            options["slots"],
            options["caching"],
            partial(flaky_cache, reaches=reaches, step_tokens=options["tokens"]),
            **options["strategy"],
            swap=SwapSpace(options["host_slots"]),
            budget=options["budget"],
            forecast=None if options["strategy"]["order"] != "slack" else settled_forecast(),
            speculation=SpeculationController(proposer, draft_length=length) if length else None,
        )
        self.kv = self.scheduler.kv
        assert isinstance(self.kv, FlakyKVCache)
        self.kv.failures = random.Random(1)
        self.kv.on_attempt = self.check_starved_first
        self.memory = MemoryModel(options["block_size"], reaches)
        self.capacity = min(self.scheduler.capacity, 60)
        self.now = 0.0
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()
        self.in_flight = None
        self.expected: dict[str, list[int]] = {}


TestWindowedWorkload = WindowedWorkload.TestCase
TestWindowedWorkload.settings = settings(max_examples=examples(75, 600), stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [45, 400])
@pytest.mark.parametrize("reaches", [(FULL, Reach(window=8)), (Reach(window=8),), (FULL, Reach(chunk=8))])
def test_planning_ahead_changes_no_token(reaches: Sequence[Reach], num_blocks: int, depth: int) -> None:
    cache = partial(make_cache, reaches=reaches, step_tokens=32 * (1 + depth))
    plain, ahead = (make_scheduler(num_blocks, max_batch_tokens=32, kv_class=cache) for _ in range(2))
    for scheduler in (plain, ahead):
        submit_all(scheduler, seed=0)
    run_to_end(plain)
    run_pipelined(ahead, depth)
    assert outcome(plain)[:2] == outcome(ahead)[:2]
    check_quiescent(ahead)


def test_what_comes_from_host_memory_is_indexed_only_where_it_is_held() -> None:
    kv = make_cache(40, 4, reaches=(FULL, Reach(window=6)), step_tokens=64)
    assert isinstance(kv, GroupedCache)
    request = make_request("a", 30)
    kv.attach(request, kv.match(request))
    request.start_from(24)
    restored = kv.restore(request)
    assert restored is not None
    assert sorted(restored) == [*((0, position) for position in range(6)), (1, 4), (1, 5)]
    assert kv.reserve(request, 6) == ()
    request.start_from(30)
    kv.commit(request)
    window = kv.windows[0]
    assert len(kv.index) == 7
    assert set(window.index.blocks()) == set(window.held(request)[:3])


@pytest.mark.parametrize("reaches", [(FULL, Reach(window=6)), (Reach(window=6),)])
@pytest.mark.parametrize("num_prompt", [13, 14, 15, 16])
def test_a_leader_comes_back_from_host_memory_with_what_its_own_tokens_see(
    num_prompt: int, reaches: Sequence[Reach]
) -> None:
    """While it runs, it keeps blocks for completions that have not forked yet, too; those are not copied."""
    cache = partial(make_cache, reaches=reaches, step_tokens=64)
    scheduler = make_scheduler(60, 4, kv_class=cache, swap=SwapSpace(50))
    leader = make_request("a", num_prompt, 12, params=SamplingParams(max_tokens=12, n=2))
    scheduler.submit(leader, 0.0)
    while leader.num_output < 4:
        step(scheduler)
        scheduler.state.preempt(leader, 0.0, PlanBuilder(StepLimits.most(64)))
        evicted = scheduler.kv.pool.take(scheduler.kv.num_free)
        assert evicted is not None
        scheduler.kv.pool.release(evicted)
    run_to_end(scheduler)
    assert leader.num_output == 12
    check_quiescent(scheduler)


def test_no_request_waits_for_blocks_before_the_window_that_a_request_started_with() -> None:
    cache = partial(make_cache, reaches=(Reach(window=8),), step_tokens=64)
    scheduler = make_scheduler(40, 4, max_prefill_tokens=8, kv_class=cache)
    first = list(range(100, 141))
    scheduler.submit(make_request("a", first, 2), 0.0)
    run_to_end(scheduler)
    pool = scheduler.kv.pool
    evicted = pool.take(pool.num_free - 2)
    assert evicted is not None
    pool.release(evicted)
    long, short = make_request("b", [*first, 1, 2, 3, 4], 90), make_request("c", [*first[:14], 5, 6, 7], 1)
    scheduler.submit(long, 0.0)
    step(scheduler)
    assert long.num_computed > 40, "it has started with the last blocks, which are all that is left"
    scheduler.submit(short, 0.0)
    step(scheduler)
    assert scheduler.why_waiting("c") is None

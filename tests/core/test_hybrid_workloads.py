"""Random workloads on the scheduler of a model with recurrent layers: no state slot is lost, written by two requests or
read before it is written, and every chunk continues from the state after exactly the tokens before it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from chairlift.core.integrity import check_quiescent
from chairlift.core.request import Request
from chairlift.speculation.control.controller import SpeculationController
from tests.core.driving import make_scheduler, run_pipelined, run_to_end, with_states
from tests.core.memory_model import MemoryModel
from tests.core.test_pipelined import outcome, submit_all
from tests.core.test_properties import SCHEDULERS, FlakyHybridCache, Workload
from tests.repeatable import examples
from tests.speculation.drafting import RandomProposer, continue_deterministically


class HybridWorkload(Workload):
    """The workload of the scheduler's own property tests, with state slots, and with or without drafts."""

    @initialize(
        **{name: strategy for name, strategy in SCHEDULERS.items() if name != "host_slots"},
        num_slots=st.integers(2, 20),
        interval=st.none() | st.integers(1, 16),
        length=st.integers(0, 5),
        seed=st.integers(0, 1000),
    )
    def start(self, **options: Any) -> None:
        proposer = RandomProposer(continue_deterministically, seed=options["seed"])
        length = options["length"]
        self.scheduler = make_scheduler(
            options["num_blocks"],
            options["block_size"],
            options["tokens"],
            options["prefill"],
            options["slots"],
            options["caching"],
            partial(
                with_states,
                num_slots=options["num_slots"],
                snapshot_interval=options["interval"],
                kv_class=FlakyHybridCache,
            ),
            **options["strategy"],
            speculation=SpeculationController(proposer, draft_length=length) if length else None,
        )
        self.kv = self.scheduler.kv
        assert isinstance(self.kv, FlakyHybridCache)
        self.kv.failures = random.Random(1)
        self.kv.on_attempt = self.check_starved_first
        self.memory = MemoryModel(options["block_size"])
        self.capacity = options["num_blocks"] * options["block_size"]
        self.now = 0.0
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()
        self.in_flight = None
        self.expected: dict[str, list[int]] = {}


TestHybridWorkload = HybridWorkload.TestCase
TestHybridWorkload.settings = settings(max_examples=examples(75, 400), stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(22, 30), (200, 6), (200, 60)])
@pytest.mark.parametrize("seed", range(3))
def test_planning_ahead_changes_no_token(seed: int, num_blocks: int, num_slots: int, depth: int) -> None:
    cache = partial(with_states, num_slots=num_slots, snapshot_interval=8)
    plain, ahead = (make_scheduler(num_blocks, max_batch_tokens=32, kv_class=cache) for _ in range(2))
    for scheduler in (plain, ahead):
        submit_all(scheduler, seed)
    run_to_end(plain)
    run_pipelined(ahead, depth, execute=MemoryModel(ahead.kv.block_size).run_states)
    assert outcome(plain)[:2] == outcome(ahead)[:2]
    check_quiescent(ahead)

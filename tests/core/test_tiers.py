"""Tiers behind the prefix cache: random workloads with slow and unreliable tiers, and what they decide."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from chairlift.core.events import RequestAdmitted
from chairlift.core.integrity import check_quiescent
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.loads import always_load
from chairlift.core.kv.tiers import KEYS_AND_VALUES, STATE, LoadEnded, Lost, PartKey, PartMove, Tier, TierMover, Tiers
from chairlift.core.request import Ending, FinishReason
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.speculation.control.controller import SpeculationController
from tests.core.driving import events_of, make_request, make_scheduler, run_to_end, with_states
from tests.core.driving import step as run_step
from tests.core.memory_model import MemoryModel
from tests.core.test_properties import BUDGET_NAMES, SCHEDULERS, FlakyHybridCache, FlakyKVCache, Workload
from tests.repeatable import examples
from tests.speculation.drafting import RandomProposer, continue_deterministically

MISSING = object()
PART_BYTES = {KEYS_AND_VALUES: 10, STATE: 7}


class FakeMover(TierMover):
    """Moves the contents of a memory model; each load takes some steps, and may fail in part."""

    def __init__(self, memory: MemoryModel | None = None, seed: int = 0, failures: float = 0.0, steps: int = 0) -> None:
        self.memory = memory or MemoryModel(4)
        self.rng = random.Random(seed)
        self.failures, self.steps = failures, steps
        self.stores: dict[tuple[str, PartKey], Any] = {}
        self.loading: list[tuple[int, int, list[tuple[str, PartMove, Any]]]] = []
        self.lost: list[Lost | LoadEnded] = []

    def _contents(self, part: str) -> dict[int, Any]:
        return self.memory._states if part == STATE else self.memory._device  # type: ignore[return-value]

    def save(self, tier_moves: Sequence[tuple[Sequence[str], PartMove]]) -> None:
        for tiers, move in tier_moves:
            content = self._contents(move.key.part).get(move.place)
            content = dict(content) if isinstance(content, dict) else content
            for tier in tiers:
                if self.rng.random() < self.failures:
                    self.lost.append(Lost(tier, move.key))
                else:
                    self.stores[tier, move.key] = content

    def load(self, load_id: int, moves: Sequence[tuple[str, PartMove]]) -> None:
        contents = [(tier, move, self.stores.get((tier, move.key), MISSING)) for tier, move in moves]
        self.loading.append((self.rng.randint(0, self.steps), load_id, contents))

    def drop(self, tier: str, keys: Sequence[PartKey]) -> None:
        for key in keys:
            self.stores.pop((tier, key), None)

    def reports(self) -> Sequence[Lost | LoadEnded]:
        found, self.lost = self.lost, []
        waiting = []
        for steps, load_id, contents in self.loading:
            if steps:
                waiting.append((steps - 1, load_id, contents))
                continue
            failed = set()
            for tier, move, content in contents:
                if failed or content is MISSING or self.rng.random() < self.failures:
                    if not failed:
                        self.stores.pop((tier, move.key), None)
                        found.append(Lost(tier, move.key))
                    failed.add(move.key)
                else:
                    whole = dict(content) if isinstance(content, dict) else content
                    self._contents(move.key.part)[move.place] = whole
            found.append(LoadEnded(load_id, frozenset(failed)))
        self.loading = waiting
        return found


def add_tiers(
    kv: KVCache, mover: FakeMover, host: int = 100, disk: int | None = None, part_bytes: Mapping[str, int] = PART_BYTES
) -> Tiers:
    tiers = [Tier("host", host)] + ([] if disk is None else [Tier("disk", disk)])
    own = Tiers(tiers, mover, part_bytes)
    kv.use_tiers(own, always_load)
    return own


class TieredWorkload(Workload):
    """The workload of the scheduler's own property tests with tiers, also for models with recurrent layers."""

    @initialize(
        **{name: strategy for name, strategy in SCHEDULERS.items() if name != "caching"},
        budget=st.sampled_from(BUDGET_NAMES),
        num_slots=st.none() | st.integers(2, 20),
        host=st.integers(0, 400),
        disk=st.none() | st.integers(0, 800),
        failures=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        delay=st.integers(0, 6),
        length=st.integers(0, 3),
        seed=st.integers(0, 1000),
    )
    def start(self, **options: Any) -> None:
        num_slots, length = options["num_slots"], options["length"]
        kv_class: Any = FlakyKVCache
        if num_slots is not None:
            kv_class = partial(with_states, num_slots=num_slots, snapshot_interval=4, kv_class=FlakyHybridCache)
            options["host_slots"] = 0
        super().start(
            options["num_blocks"],
            options["block_size"],
            options["tokens"],
            options["prefill"],
            options["slots"],
            True,
            options["strategy"],
            options["host_slots"],
            options["budget"],
            kv_class=kv_class,
            speculation=SpeculationController(
                RandomProposer(continue_deterministically, seed=options["seed"]), draft_length=length
            )
            if length
            else None,
        )
        self.mover = FakeMover(self.memory, options["seed"], options["failures"], options["delay"])
        add_tiers(self.kv, self.mover, options["host"], options["disk"])

    def accounting_holds(self) -> None:
        super().accounting_holds()
        if hasattr(self, "mover"):
            check_tiers(self.kv, self.mover)


def check_tiers(kv: KVCache, mover: FakeMover) -> None:
    """Check that a tier is never over its limit, and that every store holds only what its tier knows of."""
    assert kv.tiers is not None
    lost = {(report.tier, report.key) for report in mover.lost if isinstance(report, Lost)}
    for tier in kv.tiers.tiers:
        assert tier.num_used <= tier.num_bytes
        stored = {key for name, key in mover.stores if name == tier.name}
        assert all(map(tier.contains, stored)), "a part is in a store but in no tier: it will never be dropped"
        known = {key for key in tier._sizes if (tier.name, key) not in lost}
        gone = known - stored
        assert all(_is_pending(kv.tiers, key) for key in gone), "a tier has lost a part without knowing it"


def _is_pending(tiers: Tiers, key: PartKey) -> bool:
    return any(move.key == key for move in tiers._pending)


TestTieredWorkload = TieredWorkload.TestCase
TestTieredWorkload.settings = settings(max_examples=examples(20, 400), stateful_step_count=40, deadline=None)


def tiered(num_blocks: int = 6, steps: int = 0, **options: Any) -> tuple[Scheduler, FakeMover, Tiers]:
    """A scheduler with blocks of four tokens and a large tier."""
    scheduler = make_scheduler(num_blocks, block_size=4, **options)
    mover = FakeMover(steps=steps)
    return scheduler, mover, add_tiers(scheduler.kv, mover, host=1000)


def run_one(scheduler: Scheduler, name: str, prompt: int | Sequence[int], **options: Any) -> RequestAdmitted:
    """Run a request alone to its end; return its admission."""
    scheduler.submit(make_request(name, prompt, new=1, **options), 0.0)
    run_to_end(scheduler)
    (event,) = (event for event in events_of(scheduler, RequestAdmitted) if event.request_id == name)  # type: ignore[attr-defined]
    assert isinstance(event, RequestAdmitted)
    return event


def test_an_evicted_prefix_comes_back_from_a_tier() -> None:
    scheduler, _, tiers = tiered()
    first = list(range(100, 117))
    assert run_one(scheduler, "a", first).cached_tokens == 0
    run_one(scheduler, "b", 20)  # evicts it
    assert run_one(scheduler, "c", first).cached_tokens == 16
    assert tiers.loaded_bytes["host"] == 3 * 10  # One of its blocks was left on the device.
    check_quiescent(scheduler)


def test_another_salt_finds_nothing() -> None:
    scheduler, _, tiers = tiered()
    first = list(range(100, 117))
    run_one(scheduler, "a", first, salt="one key")
    run_one(scheduler, "b", 20)
    assert run_one(scheduler, "c", first, salt="another key").cached_tokens == 0
    assert not tiers.loaded_bytes


def test_a_request_says_that_it_waits_for_blocks_and_others_go_on() -> None:
    scheduler, mover, _ = tiered(num_blocks=14)
    first = list(range(100, 117))
    run_one(scheduler, "a", first)
    run_one(scheduler, "b", 53)
    mover.steps = 1000
    mover.rng = random.Random(3)
    scheduler.submit(make_request("c", first, new=1), 0.0)
    scheduler.submit(make_request("d", 5, new=3), 0.0)
    assert [chunk.request.id for chunk in run_step(scheduler).chunks] == ["d"]
    assert scheduler.why_waiting("c") is WaitReason.LOADING
    for time in range(1, 10):
        run_step(scheduler, now=0.1 * time)
        assert scheduler.why_waiting("c") is WaitReason.LOADING or scheduler.get("d") is None
    assert scheduler.get("d") is None


def test_a_load_that_takes_too_long_is_not_waited_for() -> None:
    scheduler, mover, _ = tiered()
    first = list(range(100, 117))
    run_one(scheduler, "a", first)
    run_one(scheduler, "b", 20)
    mover.load = lambda load_id, moves: None  # type: ignore[method-assign]
    scheduler.submit(make_request("c", [*first, 1, 2], new=1), 0.0)
    run_step(scheduler)
    assert scheduler.why_waiting("c") is WaitReason.LOADING
    assert scheduler.kv.num_free == 2  # The load keeps its blocks until the mover has answered.
    assert not run_step(scheduler, now=0.9)
    mover.lost.append(LoadEnded(1))
    mover.loading.clear()
    run_to_end(scheduler)
    check_quiescent(scheduler)


def test_a_load_outlives_its_request() -> None:
    scheduler, mover, _ = tiered(steps=3)
    first = list(range(100, 117))
    run_one(scheduler, "a", first)
    run_one(scheduler, "b", 20)
    scheduler.submit(make_request("c", first, new=1), 0.0)
    run_step(scheduler)
    scheduler.finish("c", Ending(FinishReason.CANCELLED), 0.0)
    run_to_end(scheduler)
    check_quiescent(scheduler)
    assert not mover.loading


def test_a_request_with_the_id_of_one_that_ended_while_loading_keeps_its_claims() -> None:
    scheduler, _, _ = tiered(num_blocks=16, steps=4, max_prefill_tokens=4)
    first, other = list(range(100, 117)), list(range(900, 921))
    run_one(scheduler, "a", first)
    run_one(scheduler, "b", 60)
    scheduler.submit(make_request("c", first, new=1), 0.0)
    run_step(scheduler)
    scheduler.finish("c", Ending(FinishReason.CANCELLED), 0.0)
    scheduler.submit(make_request("c", other, new=1), 0.0)
    while scheduler.kv.loads:
        run_step(scheduler)
    assert scheduler.get("c") is not None
    scheduler.finish("c", Ending(FinishReason.CANCELLED), 0.0)
    scheduler.submit(make_request("d", other, new=1), 0.0)
    run_step(scheduler)
    assert scheduler.why_waiting("d") is None
    run_to_end(scheduler)
    check_quiescent(scheduler)


@pytest.mark.parametrize(("seconds_per_token", "cached"), [(1.0, 16), (1e-12, 4)])
def test_the_faster_of_loading_and_computing_is_chosen(seconds_per_token: float, cached: int) -> None:
    scheduler, mover, tiers = tiered()
    scheduler.kv.use_tiers(tiers, lambda tokens, start: seconds_per_token * tokens)
    first = list(range(100, 117))
    run_one(scheduler, "a", first)
    run_one(scheduler, "b", 20)
    assert run_one(scheduler, "c", first).cached_tokens == cached
    assert not mover.loading


def test_only_the_part_from_the_faster_tier_is_loaded() -> None:
    """The disk is slower than computing, host memory is not, and the disk has the end of the prefix."""
    scheduler, _, _ = tiered()
    host, disk = Tier("host", 1000), Tier("disk", 1000)
    host.learn(10_000, 1e-9)
    disk._speed = 1.0
    mover = FakeMover()
    own = Tiers([host, disk], mover, PART_BYTES)
    scheduler.kv.use_tiers(own, lambda tokens, start: 0.1 * tokens)
    first = list(range(100, 117))
    run_one(scheduler, "a", first)
    for digest in make_digests(scheduler, first)[2:]:
        host.evict(PartKey(digest, KEYS_AND_VALUES))
    run_one(scheduler, "b", 20)
    assert run_one(scheduler, "c", first).cached_tokens == 8
    assert own.loaded_bytes == {"host": 10}  # The first block was left on the device.


def make_digests(scheduler: Scheduler, tokens: Sequence[int]) -> Sequence[bytes]:
    request = make_request("digests", tokens)
    return scheduler.kv.index.digests(request, len(tokens) // scheduler.kv.block_size)


def test_a_state_is_loaded_with_the_blocks_before_it() -> None:
    cache = partial(with_states, num_slots=4)
    scheduler, _, tiers = tiered(num_blocks=8, kv_class=cache)
    first = list(range(100, 121))
    run_one(scheduler, "a", first)
    run_one(scheduler, "b", 30)
    assert run_one(scheduler, "c", first).cached_tokens == 20
    assert tiers.loaded_bytes["host"] == 5 * 10 + 7


def test_a_tier_evicts_what_was_used_longest_ago() -> None:
    keys = [PartKey(bytes([number]), KEYS_AND_VALUES) for number in range(4)]
    tier = Tier("host", 30)
    assert not any(tier.put(key, 10) for key in keys[:3])
    tier.get(keys[0])
    assert tier.put(keys[3], 10) == [keys[1]]
    assert tier.put(PartKey(b"large", KEYS_AND_VALUES), 31) == []
    assert [tier.contains(key) for key in keys] == [True, False, True, True]

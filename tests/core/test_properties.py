"""Random workloads against the scheduler and KV accounting, with every invariant checked after every step."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.core.integrity import check_accounting, check_plan, check_quiescent, check_shared_prefixes
from chairlift.core.kv_cache import KVCache
from chairlift.core.plan import BlockCopy, StepPlan
from chairlift.core.request import Ending, FinishReason, Request
from tests.core.driving import deterministic_token, make_request, make_scheduler, run_plan, shape


class FlakyKVCache(KVCache):
    """Refuses a reservation now and then, as if memory had been short."""

    failures = random.Random(0)
    failing = False

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        if self.failing and self.failures.random() < 0.3:
            return None
        return super().reserve(request, count)


class Workload(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 40),
        block_size=st.sampled_from([1, 2, 4, 16]),
        tokens=st.integers(1, 40),
        prefill=st.none() | st.integers(1, 20),
        seats=st.integers(1, 6),
        caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, block_size: int, tokens: int, prefill: int | None, seats: int, caching: bool
    ) -> None:
        self.make = lambda: make_scheduler(num_blocks, block_size, tokens, prefill, seats, caching, FlakyKVCache)
        self.scheduler = self.make()
        self.kv = self.scheduler.kv
        assert isinstance(self.kv, FlakyKVCache)
        self.kv.failures = random.Random(1)
        self.capacity = num_blocks * block_size
        self.now = 0.0
        self.requests: list[Request] = []
        self.in_flight: StepPlan | None = None
        self.expected: dict[str, list[int]] = {}

    @rule(
        length=st.integers(1, 30),
        new=st.integers(1, 12),
        family=st.integers(0, 2),
        salt=st.sampled_from(["", "x"]),
        siblings=st.integers(0, 2),
        patience=st.none() | st.integers(5, 60),
    )
    def submit(self, length: int, new: int, family: int, salt: str, siblings: int, patience: int | None) -> None:
        new = min(new, self.capacity - 1)
        length = min(length, self.capacity - new + 1)
        prompt = [family * 1000 + i // 3 for i in range(length)]  # prompts of a family share prefixes
        deadline = None if patience is None else self.now + patience
        leader: Request | None = None
        for _ in range(1 + siblings):
            name = f"r{len(self.requests)}"
            request = make_request(name, prompt, new, salt=salt, deadline=deadline, leader=leader)
            self.scheduler.submit(request, self.now)
            self.requests.append(request)
            leader = leader or request

    @precondition(lambda self: self.in_flight is None)
    @rule(flaky=st.booleans())
    def schedule(self, flaky: bool) -> None:
        self.now += 1.0
        self.kv.failing = flaky
        self.in_flight = self.scheduler.schedule(self.now)
        self.kv.failing = False
        check_plan(self.scheduler, self.in_flight)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def apply(self) -> None:
        assert self.in_flight is not None
        self.scheduler.apply(run_plan(self.in_flight), self.now)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def interrupt(self) -> None:
        assert self.in_flight is not None
        self.scheduler.abandon(self.in_flight, self.now)
        self.in_flight = None

    @precondition(lambda self: bool(self.requests))
    @rule(choice=st.integers(0, 10_000))
    def cancel(self, choice: int) -> None:
        victim = self.requests[choice % len(self.requests)]
        self.scheduler.finish(victim.id, Ending(FinishReason.CANCELLED), self.now)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            check_accounting(self.scheduler)
            check_shared_prefixes(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.apply()
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.schedule(flaky=False)
            assert self.in_flight or not self.scheduler.has_work, "there is work, but the step is empty"
            self.apply()
            self.books_balance()
        check_quiescent(self.scheduler)
        for request in self.requests:
            assert request.ending is not None, f"{request} never ended"
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Whatever happened to it, its tokens are those it would have got alone."""
        alone = list(request.prompt)
        for token in request.output:
            assert token == (31 * alone[-1] + 7 * len(alone)) % 997
            alone.append(token)
        assert request.ending is not None
        if request.ending.reason is FinishReason.LENGTH:
            assert request.num_output == request.max_new_tokens


TestWorkload = Workload.TestCase
TestWorkload.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_replaying_a_workload_gives_the_same_schedule() -> None:
    for seed in range(20):
        histories = []
        for _ in range(2):
            chance = random.Random(seed)
            scheduler = make_scheduler(chance.randint(8, 30), 4, chance.randint(2, 30), None, chance.randint(1, 6))
            history = []
            for number in range(200):
                if chance.random() < 0.4:
                    prompt = [chance.randint(0, 2)] * chance.randint(1, 20)
                    scheduler.submit(make_request(f"r{number}", prompt, chance.randint(1, 10)), float(number))
                plan = scheduler.schedule(float(number))
                history.append((shape(plan), [tuple(chunk.table) for chunk in plan.chunks]))
                scheduler.apply(run_plan(plan, deterministic_token), float(number))
            histories.append((history, scheduler.drain_events()))
        assert histories[0] == histories[1]

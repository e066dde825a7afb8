"""Random workloads on the scheduler, with all invariants checked after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.core.events import RequestAdmitted, RequestPreempted
from chairlift.core.integrity import check_accounting, check_plan, check_quiescent, check_shared_prefixes
from chairlift.core.kv.kv_cache import HybridCache, KVCache
from chairlift.core.kv.prefix_index import PrefixMatch
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.lengths import OutputLengths
from chairlift.core.plan import BlockCopy, StepPlan
from chairlift.core.policies.base import BatchPolicy
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.speculation.control.controller import SpeculationController
from tests.core.driving import (
    ORDERS,
    deterministic_token,
    make_request,
    make_scheduler,
    run_plan,
    settled_forecast,
    shape,
)
from tests.core.memory_model import MemoryModel
from tests.repeatable import examples

BUDGET_NAMES = ["fixed", "knee", "latency", "slack"]
STRATEGIES = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
        "order": st.sampled_from(ORDERS),
        "max_overtakes": st.sampled_from([1, 3, 16]),
        "heavy": st.sampled_from([None, 0, 2]),
        "takes_slots": st.booleans(),
        "lengths": st.none() | st.builds(OutputLengths),
    }
)


TARGETS = st.sampled_from([NO_TARGETS, Targets(ttft=3.0), Targets(tpot=1.5, e2e=20.0), Targets(5.0, 2.0, 60.0)])


class FlakyKVCache(KVCache):
    """Fails some reservations at random, as if memory were short, and reports each attempt to admit a request."""

    failures = random.Random(0)
    failing = False
    on_attempt: Callable[[Request], None] = staticmethod(lambda request: None)

    def attach(self, request: Request, match: PrefixMatch) -> None:
        self.on_attempt(request)
        super().attach(request, match)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        self.on_attempt(child)
        super().fork(parent, child, num_tokens)

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        if self.failing and self.failures.random() < 0.3:
            return None
        return super().reserve(request, count)


class FlakyHybridCache(FlakyKVCache, HybridCache):
    """The same for a model with recurrent layers."""


# The options of random schedulers.
SCHEDULERS: dict[str, st.SearchStrategy[Any]] = {
    "num_blocks": st.integers(8, 40),
    "block_size": st.sampled_from([1, 2, 4, 16]),
    "tokens": st.integers(1, 40),
    "prefill": st.none() | st.integers(1, 20),
    "slots": st.integers(1, 6),
    "caching": st.booleans(),
    "strategy": STRATEGIES,
    "host_slots": st.sampled_from([0, 0, 5, 60]),
}


class Workload(RuleBasedStateMachine):
    @initialize(**SCHEDULERS, budget=st.sampled_from(BUDGET_NAMES))
    def start(
        self,
        num_blocks: int,
        block_size: int,
        tokens: int,
        prefill: int | None,
        slots: int,
        caching: bool,
        strategy: dict[str, Any],
        host_slots: int,
        budget: str = "fixed",
        kv_class: Callable[..., KVCache] = FlakyKVCache,
        speculation: SpeculationController | None = None,
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks,
            block_size,
            tokens,
            prefill,
            slots,
            caching,
            kv_class,
            **strategy,
            speculation=speculation,
            swap=SwapSpace(host_slots),
            budget=budget,
            forecast=None if strategy["order"] != "slack" else settled_forecast(),
        )
        self.kv = self.scheduler.kv
        assert isinstance(self.kv, FlakyKVCache)
        self.kv.failures = random.Random(1)
        self.kv.on_attempt = self.check_starved_first
        self.memory = MemoryModel(block_size)
        self.capacity = num_blocks * block_size
        self.now = 0.0
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()
        self.in_flight: StepPlan | None = None
        self.expected: dict[str, list[int]] = {}

    @rule(
        length=st.integers(1, 30),
        new=st.integers(1, 12),
        family=st.integers(0, 2),
        salt=st.sampled_from(["", "x"]),
        siblings=st.integers(0, 2),
        timeout=st.none() | st.integers(5, 60),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("abc"),
        wanted=TARGETS,
    )
    def submit(
        self,
        length: int,
        new: int,
        family: int,
        salt: str,
        siblings: int,
        timeout: int | None,
        priority: int,
        tenant: str,
        wanted: Targets = NO_TARGETS,
    ) -> None:
        new = min(new, self.capacity - 1)
        length = min(length, self.capacity - new + 1)
        prompt = [family * 1000 + i // 3 for i in range(length)]  # prompts of a family share prefixes
        deadline = None if timeout is None else self.now + timeout
        leader: Request | None = None
        params = SamplingParams(max_tokens=new, n=1 + siblings)
        for _ in range(1 + siblings):
            name = f"r{len(self.requests)}"
            request = make_request(name, prompt, new, params=params, salt=salt, deadline=deadline, leader=leader)
            request.arrival, request.priority, request.tenant, request.targets = self.now, priority, tenant, wanted
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
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            assert request.deadline is None or request.deadline > self.now, f"{request} is past its deadline"
            waits = request.status is Status.WAITING
            assert waits == (self.scheduler.why_waiting(request.id) is not None)

    def check_starved_first(self, attempted: Request) -> None:
        """No request is tried while starved ones wait, unless they wait for another request or for a batch to end."""
        policy = self.scheduler.policy
        candidates = policy._members_waiting() if isinstance(policy, BatchPolicy) else self.scheduler.waiting
        if not attempted.starved:
            reasons = {self.scheduler.why_waiting(other.id) for other in candidates if other.starved}
            assert reasons <= {WaitReason.SIBLING, WaitReason.PREFIX, WaitReason.LOADING}

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def apply(self) -> None:
        assert self.in_flight is not None
        self.memory.run(self.in_flight)
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
        self.cancelled.add(victim.id)

    @invariant()
    def accounting_holds(self) -> None:
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
            wakeup = self.scheduler.next_wakeup(self.now)
            stuck = not self.in_flight and wakeup is not None and wakeup <= self.now and not self.kv.loads
            assert not stuck, "there is work, but the step is empty"
            if not self.in_flight and wakeup is not None:
                self.now = wakeup
            self.apply()
            self.accounting_holds()
        check_quiescent(self.scheduler)
        for request in self.requests:
            assert request.ending is not None, f"{request} never ended"
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Its tokens are those that it would have generated alone."""
        alone = list(request.prompt)
        for token in request.output:
            assert token == (31 * alone[-1] + 7 * len(alone)) % 997
            alone.append(token)
        assert request.ending is not None
        if request.ending.reason is FinishReason.LENGTH:
            assert request.num_output == request.max_new_tokens
        else:
            late = request.ending.reason is FinishReason.DEADLINE and request.deadline is not None
            assert late or request.id in self.cancelled, f"{request} ended unexpectedly: {request.ending}"


TestWorkload = Workload.TestCase
TestWorkload.settings = settings(max_examples=examples(75, 300), stateful_step_count=60, deadline=None)


def test_a_starved_request_is_next_once_its_sibling_runs() -> None:
    """An interrupted step preempts its leader, which is admitted again with its prompt cached: in the same step, the
    starved sibling can share it, and comes before others."""
    workload = Workload()
    strategy = {"policy": "continuous", "order": "fcfs", "max_overtakes": 1, "heavy": None}
    workload.start(8, 1, 4, None, 4, True, strategy, host_slots=0)
    submit = partial(workload.submit, family=0, timeout=None, priority=0, tenant="a")
    submit(length=2, new=2, salt="x", siblings=2)
    submit(length=2, new=2, salt="", siblings=0)
    workload.schedule(flaky=False)
    submit(length=1, new=1, salt="", siblings=0)
    workload.apply()
    workload.schedule(flaky=False)
    starved = workload.requests[1]
    assert starved.starved
    workload.interrupt()
    workload.schedule(flaky=False)
    assert starved.status is Status.RUNNING
    workload.teardown()


def test_replaying_a_workload_gives_the_same_schedule() -> None:
    for seed in range(20):
        histories = []
        for _ in range(2):
            rng = random.Random(seed)
            scheduler = make_scheduler(rng.randint(8, 30), 4, rng.randint(2, 30), None, rng.randint(1, 6))
            history = []
            for number in range(200):
                if rng.random() < 0.4:
                    prompt = [rng.randint(0, 2)] * rng.randint(1, 20)
                    scheduler.submit(make_request(f"r{number}", prompt, rng.randint(1, 10)), float(number))
                plan = scheduler.schedule(float(number))
                history.append((shape(plan), [tuple(chunk.table) for chunk in plan.chunks]))
                scheduler.apply(run_plan(plan, deterministic_token), float(number))
            histories.append((history, scheduler.drain_events()))
        assert histories[0] == histories[1]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.sampled_from(BUDGET_NAMES),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(-2, 2), st.sampled_from("abc"), TARGETS),
        max_size=80,
    ),
)
def test_the_number_of_admissions_before_a_request_is_bounded(
    order: str,
    budget: str,
    slots: int,
    max_overtakes: int,
    heavy: int | None,
    takes_slots: bool,
    work: list[tuple[int, int, int, str, Targets]],
) -> None:
    """A request is admitted after at most (max_overtakes + 1) * (q + 1) admissions, q being the older requests that
    wait when it is submitted or return to the queue later (fair sharing preempts)."""
    scheduler = make_scheduler(
        2000,
        max_batch_requests=slots,
        order=order,
        budget=budget,
        max_overtakes=max_overtakes,
        prefix_caching=False,
        heavy=heavy,
        takes_slots=takes_slots,
    )
    admissions = 0
    latest: dict[str, int] = {}

    def step() -> None:
        nonlocal admissions
        plan = scheduler.schedule(0.0)
        scheduler.apply(run_plan(plan), 0.0)
        for event in scheduler.drain_events():
            if isinstance(event, RequestAdmitted):
                admissions += 1
                assert admissions <= latest.pop(event.request_id, admissions)
            elif isinstance(event, RequestPreempted):
                for other in latest:
                    if int(other[1:]) > int(event.request_id[1:]):
                        latest[other] += max_overtakes + 1
                latest[event.request_id] = admissions + (max_overtakes + 1) * (len(scheduler.waiting) + 1)

    for number, (prompt, new, priority, tenant, targets) in enumerate(work):
        latest[f"r{number}"] = admissions + (max_overtakes + 1) * (len(scheduler.waiting) + 1)
        request = make_request(f"r{number}", prompt, new, priority=priority, tenant=tenant, targets=targets)
        scheduler.submit(request, 0.0)
        if number % 2:
            step()
    while scheduler.has_work:
        step()
    assert not latest

"""The scheduler on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.router import Router
from chairlift.core.budgets.base import FixedBudget
from chairlift.core.cost_model import StepShape
from chairlift.core.integrity import check_quiescent
from chairlift.core.lengths import OutputLengths
from chairlift.core.orderings.base import make_ordering
from chairlift.core.policies.base import make_policy
from chairlift.core.targets import parse_classes
from chairlift.errors import InvalidParameter
from chairlift_lab.planning.prediction import SCHEDULERS, ReplicaSettings
from chairlift_lab.simulator.outcome import Arrival, SimulationOutcome
from chairlift_lab.simulator.replica import Replica
from chairlift_lab.simulator.scheduler import SimulatedKVCache
from chairlift_lab.simulator.simulation import simulate
from chairlift_lab.simulator.step_cost import (
    DEVICES,
    LinearCost,
    ModelShape,
    Roofline,
    SpeedCursor,
    SpeedProfile,
    device_named,
)
from tests.core.driving import ORDERS
from tests.repeatable import examples

UNEVEN = SpeedProfile(((0.031, 0.020), (0.007, 0.050), (0.113, 0.131), (0.0005, 0.0004)))


class Linear(LinearCost):
    """A step takes 10 ms, plus 1 ms per token and 10 µs per KV position."""

    seconds_per_position = 0.00001

    def predict(self, shape: StepShape) -> float:
        return 0.010 + 0.001 * shape.tokens + 0.00001 * shape.prefill_kv + 0.00001 * shape.decode_kv


def make_replica(
    *,
    fast_forward: bool = True,
    num_blocks: int = 400,
    block_size: int = 16,
    slots: int = 8,
    policy: str = "continuous",
    order: str = "fcfs",
    caching: bool = False,
    budget: int = 64,
    speed: SpeedCursor | None = None,
    prefill: int | None = None,
    kind: str = "chairlift",
    learn: bool = False,
) -> Replica:
    kv = SimulatedKVCache(num_blocks, block_size, prefix_caching=caching)
    limits = FixedBudget.of(budget, prefill)
    lengths = OutputLengths(knows_limits=False) if learn else None
    scheduler = SCHEDULERS[kind](kv, limits, make_policy(policy), slots, ordering=make_ordering(order), lengths=lengths)
    return Replica(scheduler, Linear(), fast_forward=fast_forward, speed=speed)


CLASSES = [None, *parse_classes(["interactive=ttft:200,tpot:30", "batch=e2e:2000"]).values()]


def arrivals(
    count: int, *, rate: float = 20.0, seed: int = 0, longest: int = 60, shared: bool = False, branching: bool = False
) -> list[Arrival]:
    """`shared`: every fourth prompt has the same tokens. `branching`: prompts with a common prefix diverge, not always
    at a block boundary."""
    rng = random.Random(seed)
    at, found = 0.0, []
    for index in range(count):
        at += rng.expovariate(rate)
        n_in = rng.randint(1, longest)
        first = 1000 * (index % 4 if shared else index)
        prompt: Sequence[int] = range(first, first + n_in)
        if branching:
            prompt = [branch for _ in range(n_in) for branch in [rng.choice((1, 2))] * 20][:n_in]
        found.append(Arrival(at, prompt, rng.randint(1, longest), CLASSES[index % 3]))
    return found


def times(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    return [(record.first_token or -1.0, record.end or -1.0) for record in outcome.records]


def test_the_times_of_one_request() -> None:
    outcome = simulate([Arrival(5.0, range(10), 3)], [make_replica()], Router("round-robin"))
    prompt = 0.010 + 0.010 + 0.00001 * 55  # 10 tokens that read 1 + 2 + ... + 10 positions
    second, third = (0.010 + 0.001 + 0.00001 * length for length in (11, 12))
    (record,) = outcome.records
    assert record.ttft == pytest.approx(prompt)
    assert record.e2e == pytest.approx(prompt + second + third)
    assert record.tpot == pytest.approx((second + third) / 2)
    assert outcome.steps == 3
    assert outcome.busy_seconds == pytest.approx(record.e2e)


@settings(deadline=None, max_examples=examples(60, 300))
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from([12, 40]),
    rate=st.sampled_from([5.0, 40.0, 1000.0]),
    block_size=st.sampled_from([2, 4, 16]),
    num_blocks=st.sampled_from([9, 17, 25, 60, 400]),
    slots=st.sampled_from([1, 3, 8, 20]),
    num_replicas=st.sampled_from([1, 2]),
    router=st.sampled_from(ROUTERS.names()),
    policy=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    order=st.sampled_from(["fcfs", "fcfs", *ORDERS]),
    caching=st.booleans(),
    shared=st.booleans(),
    branching=st.booleans(),
    budget=st.sampled_from([20, 64, 300]),
    pace=st.sampled_from([None, UNEVEN]),
    prefill=st.sampled_from([None, None, 8, 30]),
    kind=st.sampled_from(["chairlift", "chairlift", "vllm"]),
    learn=st.booleans(),
)
def test_fast_forward_changes_nothing(
    seed: int,
    count: int,
    rate: float,
    block_size: int,
    num_blocks: int,
    slots: int,
    num_replicas: int,
    router: str,
    policy: str,
    order: str,
    caching: bool,
    shared: bool,
    branching: bool,
    budget: int,
    pace: SpeedProfile | None,
    prefill: int | None,
    kind: str,
    learn: bool,
) -> None:
    """All times are equal to the last bit, also with a varying speed and with preemptions."""
    if kind == "vllm":
        policy, order, prefill, learn = "continuous", "fcfs", None, False
    outcomes, evictions = [], []
    for fast_forward in (False, True):
        replicas = [
            make_replica(
                fast_forward=fast_forward,
                num_blocks=num_blocks * 16 // block_size,
                block_size=block_size,
                slots=slots,
                policy=policy,
                order=order,
                caching=caching,
                budget=budget,
                speed=SpeedCursor(pace, index / num_replicas) if pace else None,
                prefill=prefill,
                kind=kind,
                learn=learn,
            )
            for index in range(num_replicas)
        ]
        coming = arrivals(count, rate=rate, seed=seed, shared=shared, branching=branching)
        outcomes.append(simulate(coming, replicas, Router(router)))
        for replica in replicas:
            check_quiescent(replica.scheduler)
        evictions.append([replica.scheduler.kv.pool.num_evictions for replica in replicas])
    plain, forwarded = outcomes
    assert times(forwarded) == times(plain)
    assert (forwarded.seconds, forwarded.steps) == (plain.seconds, plain.steps)
    assert forwarded.preemptions == plain.preemptions
    assert sorted(forwarded.gaps) == sorted(plain.gaps)
    assert evictions[0] == evictions[1]


def test_a_preempted_request_with_all_tokens_cached_decodes_at_once() -> None:
    """A request alone in the queue with all its tokens cached is a decode, not a prompt, with fast forward too."""
    gaps = []
    for fast_forward in (False, True):
        replicas = [make_replica(fast_forward=fast_forward, num_blocks=12, caching=True, budget=300) for _ in range(2)]
        coming = arrivals(60, rate=1000.0, seed=327000, shared=True)
        gaps.append(sorted(simulate(coming, replicas, Router("prefix-affine")).gaps))
    assert gaps[0] == gaps[1]


def test_short_memory_preempts() -> None:
    """Makes sure that the test above covers preemption."""
    outcome = simulate(arrivals(60), [make_replica(num_blocks=9)], Router("round-robin"))
    assert outcome.preemptions > 0


def test_learned_lengths_save_preemptions() -> None:
    """Outputs of much the same length, and memory for fewer requests than there are slots."""
    outcomes = []
    for learn in (False, True):
        coming = [Arrival(index * 0.01, range(index * 100, index * 100 + 20), 100 + index % 7) for index in range(120)]
        outcomes.append(simulate(coming, [make_replica(num_blocks=60, slots=20, learn=learn)], Router("round-robin")))
    today, learned = outcomes
    assert learned.preemptions * 3 < today.preemptions
    assert learned.seconds < 1.05 * today.seconds


def test_swaps_take_time() -> None:
    """Each swapped block makes a step longer; auto chooses the cheaper mode."""
    outcomes = {}
    for mode, speed in (("recompute", 1.0), ("swap", 1e9), ("swap", 1e3), ("auto", 1e9), ("auto", 1.0)):
        engine = ReplicaSettings(
            num_blocks=9, slots=8, max_batch_tokens=64, preemption=mode, swap_blocks=50, block_bytes=100,
            host_bytes_per_second=speed,
        )  # fmt: skip
        outcomes[mode, speed] = simulate(arrivals(60), [engine.make(Linear())], Router("round-robin"))
    assert all(outcome.preemptions for outcome in outcomes.values())
    assert outcomes["swap", 1e9].busy_seconds < outcomes["recompute", 1.0].busy_seconds
    assert outcomes["swap", 1e3].busy_seconds > outcomes["recompute", 1.0].busy_seconds
    assert outcomes["auto", 1e9].busy_seconds == outcomes["swap", 1e9].busy_seconds
    assert outcomes["auto", 1.0].busy_seconds == outcomes["recompute", 1.0].busy_seconds


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("router", ROUTERS.names())
def test_every_request_ends(policy: str, router: str) -> None:
    replicas = [make_replica(policy=policy) for _ in range(3)]
    outcome = simulate(arrivals(80), replicas, Router(router))
    assert len(outcome.records) == 80
    assert all(record.end is not None and record.ttft > 0 for record in outcome.records)
    assert {record.replica for record in outcome.records} == {0, 1, 2}


def test_continuous_batching_beats_static_batching() -> None:
    ends = {
        policy: simulate(arrivals(60, rate=200), [make_replica(policy=policy)], Router("round-robin")).seconds
        for policy in ("static", "continuous")
    }
    assert ends["continuous"] < ends["static"]


def test_fair_cached_computes_the_prefixes_of_tenants_less_often() -> None:
    """Tenants with a long prefix each, of which the cache holds half."""
    seconds = {}
    for order in ("fair", "fair-cached"):
        rng = random.Random(1)
        tenants = [rng.randrange(8) for _ in range(96)]
        coming = [
            Arrival(index * 1e-3, [*range(tenant * 1000, tenant * 1000 + 480), 10**6 + index], 4, tenant=f"t{tenant}")
            for index, tenant in enumerate(tenants)
        ]
        replica = make_replica(order=order, caching=True, num_blocks=130, slots=2, budget=512)
        seconds[order] = simulate(coming, [replica], Router("round-robin")).seconds
    assert seconds["fair"] > 1.3 * seconds["fair-cached"]


def test_affine_routing_finds_more_prefixes() -> None:
    def run(router: str) -> float:
        shared: Callable[[int], list[int]] = lambda group: list(range(group * 500, group * 500 + 320))  # noqa: E731
        rng = random.Random(1)
        coming = [Arrival(index * 0.5, [*shared(rng.randrange(4)), 10**6 + index], 4) for index in range(80)]
        replicas = [make_replica(caching=True, num_blocks=100) for _ in range(4)]
        return simulate(coming, replicas, Router(router)).busy_seconds

    assert run("prefix-affine") < 0.8 * run("round-robin")


SHAPE = ModelShape(
    num_parameters=8_030_000_000,
    vocab_size=128_256,
    hidden_size=4096,
    kv_bytes_per_token=131_072,
    attention_flops_per_kv=4 * 32 * 128 * 32,
    bytes_per_weight=2,
    tied_head=False,
)


def test_roofline_of_decodes_is_their_bytes_and_of_prompts_their_arithmetic() -> None:
    device = device_named("h200", step_seconds=0.0)
    cost = Roofline(SHAPE, device)
    one = cost.predict(StepShape(decode_tokens=1, decode_kv=256, requests=1))
    bytes_read = (8_030_000_000 - 128_256 * 4096) * 2 + 256 * 131_072
    assert one == pytest.approx(bytes_read / 4.3e12)
    prompt = cost.predict(StepShape(prefill_tokens=8192, prefill_kv=8192 * 1024, requests=4))
    flops = 2 * (8_030_000_000 - 2 * 128_256 * 4096) * 8192 + 8192 * 1024 * 4 * 32 * 128 * 32
    assert prompt == pytest.approx(flops / 788e12)


def test_devices_by_name() -> None:
    assert device_named("l4") is not None
    assert device_named("h200", memory_bytes=1e9).memory_bytes == 1e9
    assert set(DEVICES) >= {"h200", "a100", "l4", "cpu"}
    with pytest.raises(InvalidParameter, match="device"):
        device_named("h201")
    with pytest.raises(InvalidParameter, match="flops_per_second"):
        device_named("custom", bytes_per_second=1.0, memory_bytes=1.0)
    with pytest.raises(InvalidParameter, match="bytes_per_second"):
        device_named("l4", bytes_per_second=-1.0)

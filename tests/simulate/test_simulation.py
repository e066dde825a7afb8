"""The scheduler on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from chairlift.core.budget import FixedBudget
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.integrity import check_quiescent
from chairlift.core.kv_cache import KVCache
from chairlift.core.policy import make_policy
from chairlift.core.scheduler import Scheduler
from chairlift.errors import InvalidParameter
from chairlift.simulate.devices import DEVICES, device_named
from chairlift.simulate.replica import Replica
from chairlift.simulate.roofline import ModelShape, Roofline
from chairlift.simulate.router import ROUTERS, make_router
from chairlift.simulate.run import Arrival, Outcome, simulate


class Linear:
    """A step costs 10 ms, 1 ms a token and 10 µs for each position read: easy to follow by hand."""

    def predict(self, shape: StepShape) -> float:
        return 0.010 + 0.001 * shape.tokens + 0.00001 * (shape.decode_kv + shape.prefill_kv)


def make_replica(
    *, leaps: bool = True, num_blocks: int = 400, seats: int = 8, policy: str = "continuous", caching: bool = False
) -> Replica:
    kv = KVCache(num_blocks, 16, prefix_caching=caching)
    return Replica(Scheduler(kv, FixedBudget(64), make_policy(policy), seats), Linear(), leaps=leaps)


def arrivals(count: int, *, rate: float = 20.0, seed: int = 0, longest: int = 60) -> list[Arrival]:
    rng = random.Random(seed)
    at, found = 0.0, []
    for index in range(count):
        at += rng.expovariate(rate)
        n_in = rng.randint(1, longest)
        found.append(Arrival(at, range(1000 * index, 1000 * index + n_in), rng.randint(1, longest)))
    return found


def times(outcome: Outcome) -> list[tuple[float, float]]:
    return [(record.first_token or -1.0, record.end or -1.0) for record in outcome.records]


def test_one_request_by_hand() -> None:
    outcome = simulate([Arrival(5.0, range(10), 3)], [make_replica()], make_router("round-robin"))
    prompt = 0.010 + 0.010 + 0.00001 * 55  # 10 tokens that read 1 + 2 + ... + 10 positions
    second, third = (0.010 + 0.001 + 0.00001 * length for length in (11, 12))
    (record,) = outcome.records
    assert record.ttft == pytest.approx(prompt)
    assert record.e2e == pytest.approx(prompt + second + third)
    assert record.tpot == pytest.approx((second + third) / 2)
    assert outcome.steps == 3
    assert outcome.busy_seconds == pytest.approx(record.e2e)


@pytest.mark.parametrize("num_blocks", [9, 400])
@pytest.mark.parametrize("seed", range(3))
def test_leaps_change_nothing(seed: int, num_blocks: int) -> None:
    """Also where memory is so short that requests are preempted."""
    outcomes = []
    for leaps in (False, True):
        replica = make_replica(leaps=leaps, num_blocks=num_blocks)
        outcomes.append(simulate(arrivals(60, seed=seed), [replica], make_router("round-robin")))
        check_quiescent(replica.scheduler)
    plain, leaping = outcomes
    assert times(leaping) == [(pytest.approx(first), pytest.approx(end)) for first, end in times(plain)]
    assert leaping.steps == plain.steps
    assert leaping.preemptions == plain.preemptions
    assert (plain.preemptions > 0) == (num_blocks == 9)


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_everyone_gets_an_answer(policy: str, router: str) -> None:
    replicas = [make_replica(policy=policy) for _ in range(3)]
    outcome = simulate(arrivals(80), replicas, make_router(router))
    assert len(outcome.records) == 80
    assert all(record.end is not None and record.ttft > 0 for record in outcome.records)
    assert {record.replica for record in outcome.records} == {0, 1, 2}
    assert all(replica.load == 0 for replica in replicas)


def test_continuous_batching_beats_static_batching() -> None:
    ends = {
        policy: simulate(arrivals(60, rate=200), [make_replica(policy=policy)], make_router("round-robin")).seconds
        for policy in ("static", "continuous")
    }
    assert ends["continuous"] < ends["static"]


def test_affine_routing_finds_more_prefixes() -> None:
    def run(router: str) -> float:
        shared: Callable[[int], list[int]] = lambda group: list(range(group * 500, group * 500 + 320))  # noqa: E731
        rng = random.Random(1)
        coming = [Arrival(index * 0.5, [*shared(rng.randrange(4)), 10**6 + index], 4) for index in range(80)]
        replicas = [make_replica(caching=True, num_blocks=100) for _ in range(4)]
        return simulate(coming, replicas, make_router(router)).busy_seconds

    assert run("prefix-affine") < 0.8 * run("round-robin")


def test_a_fitted_cost_model_will_do() -> None:
    fitted = CostModel()
    rng = random.Random(2)
    for _ in range(400):
        shape = StepShape(
            rng.randint(0, 8), rng.randint(0, 64), rng.randint(0, 900), rng.randint(0, 2000), rng.randint(1, 8)
        )
        fitted.observe(shape, Linear().predict(shape))
    replica = make_replica()
    expected = simulate(arrivals(40), [replica], make_router("round-robin"))
    learned = make_replica()
    learned.cost = fitted
    found = simulate(arrivals(40), [learned], make_router("round-robin"))
    assert found.seconds == pytest.approx(expected.seconds, rel=0.05)


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

"""The default workload of `bench policies`, on a virtual clock: it must show the difference between the policies."""

from __future__ import annotations

from statistics import median

import pytest

from chairlift.cluster.routing.router import Router
from chairlift_lab.bench.policies import PoliciesSettings
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.simulator.outcome import Arrival, SimulationOutcome
from chairlift_lab.simulator.simulation import simulate
from chairlift_lab.simulator.step_cost import MeasuredCost

CPU_LIKE = MeasuredCost(step=0.012, request=0.0, prefill_kv=0.0, decode_kv=1e-6, tokens=((0, 0.0015),))


def run(settings: PoliciesSettings, policy: str, variation: float, rate: float | None) -> SimulationOutcome:
    requests = settings.workload(range(1000), variation).requests
    times = [0.0] * len(requests) if rate is None else settings.poisson(rate)
    coming = [Arrival(at, request.prompt_ids, request.n_out) for at, request in zip(times, requests, strict=True)]
    engine = ReplicaSettings(num_blocks=4000, slots=settings.slots, max_batch_tokens=256, policy=policy)
    return simulate(coming, [engine.make(CPU_LIKE)], Router("round-robin"))


def gains(seed: int, variation: float) -> tuple[float, ...]:
    """Ratios of total time and of the longest latency: dynamic to continuous, and static to dynamic."""
    settings = PoliciesSettings(seed=seed)
    rate = settings.load * settings.requests / run(settings, "continuous", variation, None).seconds
    found = [run(settings, policy, variation, rate) for policy in ("continuous", "dynamic", "static")]
    seconds = [outcome.seconds for outcome in found]
    longest = [max(record.e2e for record in outcome.records) for outcome in found]
    return seconds[1] / seconds[0], seconds[2] / seconds[1], longest[1] / longest[0], longest[2] / longest[1]


@pytest.mark.parametrize("seeds", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_continuous_beats_dynamic_beats_static(seeds: int) -> None:
    for variation, least in zip(PoliciesSettings().variations, (1.05, 1.2, 1.4), strict=True):
        found = [gains(seed, variation) for seed in range(seeds)]
        assert min(value for row in found for value in row) > 1
        continuous_to_dynamic, dynamic_to_static, *_ = (median(column) for column in zip(*found, strict=True))
        assert continuous_to_dynamic > least
        assert dynamic_to_static > 1.1

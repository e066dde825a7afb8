"""Latency targets on a machine with noise: budgets allow for slow steps, and recover once they are over."""

from __future__ import annotations

import math
import random

import pytest

from chairlift.core.budgets.latency import LatencyBudget
from chairlift.core.cost_model import CostModel
from chairlift.core.plan import StepLimits
from tests.core.test_adaptive_budget import load, percentile, serve
from tests.core.test_cost_model import SHAPE
from tests.core.timed import Noise, cpu_like, jitter


def drifting_speed(seed: int) -> Noise:
    """A speed that drifts by about a tenth over several steps; in addition, every fourth step is late."""
    source, level = random.Random(seed), 0.0

    def one() -> float:
        nonlocal level
        level = 0.8 * level + source.gauss(0, 0.06)
        late = source.expovariate(1 / 0.12) if source.random() < 0.25 else 0.0
        return math.exp(level + source.gauss(0, 0.04) + late)

    return one


def slow_bursts(seed: int) -> Noise:
    """Noise of a machine that shares its cores: one step in thirty starts a burst of steps that take 1.3 or 1.6 times
    as long."""
    source, jittered = random.Random(seed), jitter(seed, pauses=0)
    burst = 1.0

    def one() -> float:
        nonlocal burst
        if burst > 1:
            burst = burst if source.random() < 0.75 else 1.0
        elif source.random() < 1 / 30:
            burst = source.choice([1.3, 1.6])
        return burst * jittered()

    return one


def settled_cost(seed: int = 0) -> CostModel:
    cost, noise = CostModel(), jitter(seed, pauses=0)
    for _ in range(300):
        cost.observe(SHAPE, cpu_like(SHAPE) * noise())
    return cost


def test_a_target_is_met_under_drifting_speed_with_the_throughput_of_the_best_fixed_chunk() -> None:
    adaptive = serve(drifting_speed(1), target_tpot_ms=250)
    assert percentile(adaptive.gaps("run"), 0.99) <= 1.2 * 0.25
    fixed = [serve(drifting_speed(1), budget="fixed", cap=chunk) for chunk in (16, 32, 48, 64)]
    valid = [one.busy_tokens_per_second() for one in fixed if percentile(one.gaps("run"), 0.99) <= 1.2 * 0.25]
    assert adaptive.busy_tokens_per_second() >= 0.95 * max(valid)


@pytest.mark.parametrize("seed", range(3))
def test_a_target_is_met_during_slow_bursts(seed: int) -> None:
    adaptive = serve(slow_bursts(seed), prompts=30, target_tpot_ms=250)
    assert percentile(adaptive.gaps("run"), 0.99) <= 1.2 * 0.25
    fixed = [serve(slow_bursts(seed), prompts=30, budget="fixed", cap=chunk) for chunk in (16, 24, 32, 40)]
    valid = [one.busy_tokens_per_second() for one in fixed if percentile(one.gaps("run"), 0.99) <= 1.2 * 0.25]
    assert adaptive.busy_tokens_per_second() >= 0.95 * max(valid)


def test_slowdown_rises_after_a_slow_step_and_falls_again() -> None:
    cost = settled_cost()
    prediction = cost.predict(SHAPE)
    cost.observe(SHAPE, 50 * prediction)
    assert cost.slowdown == pytest.approx(math.sqrt(math.e), rel=0.05)
    assert cost.predict(SHAPE) < 1.1 * prediction
    for _ in range(5):
        cost.observe(SHAPE, cpu_like(SHAPE))
    assert cost.slowdown < 1.05


def test_chunks_shrink_right_after_a_slow_step() -> None:
    cost, truth = CostModel(), cpu_like(SHAPE)
    for _ in range(100):
        cost.observe(SHAPE, truth)
    budget = LatencyBudget(StepLimits(1024, 512), cost, target_tpot_ms=300)
    before = budget.limits(load()).prefill_tokens
    cost.observe(SHAPE, 1.5 * truth)
    assert budget.limits(load()).prefill_tokens < 0.85 * before


@pytest.mark.parametrize("times", [3, 5, 10])
def test_a_burst_of_slow_steps_does_not_raise_the_tail(times: float) -> None:
    cost = settled_cost()
    before = cost.tail
    for _ in range(10):
        cost.observe(SHAPE, times * cpu_like(SHAPE))
    for _ in range(20):
        cost.observe(SHAPE, cpu_like(SHAPE))
    assert cost.tail <= 1.1 * before


def test_frequent_late_steps_raise_the_tail() -> None:
    cost = settled_cost()
    assert cost.tail < 1.2
    for number in range(200):
        cost.observe(SHAPE, (1.6 if number % 20 == 0 else 1.0) * cpu_like(SHAPE))
    assert cost.tail > 1.5
    for _ in range(200):
        cost.observe(SHAPE, cpu_like(SHAPE))
    assert cost.tail < 1.1


@pytest.mark.parametrize("seed", range(3))
def test_budgets_recover_after_heavy_noise(seed: int) -> None:
    """Half of the first 200 steps take three to five times as long."""
    source, calm, done = random.Random(seed), jitter(seed, pauses=0), 0

    def noise() -> float:
        nonlocal done
        done += 1
        return float(source.choice([1, 1, 3, 5])) if done <= 200 else calm()

    steps = serve(noise, prompts=40, target_tpot_ms=250).steps[450:600]
    seconds = [seconds for shape, seconds in steps if shape.decode_tokens and shape.prefill_tokens > 8]
    assert percentile(seconds, 0.5) >= 0.8 * 0.25
    assert percentile(seconds, 0.99) <= 1.2 * 0.25


def test_given_coefficients_start_without_a_tail() -> None:
    assert CostModel().tail == 1.25
    assert CostModel(settled_cost().coefficients).tail == 1.0

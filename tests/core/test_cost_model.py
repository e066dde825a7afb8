"""The cost model: accuracy, forgetting, and robustness to outliers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.cost_model import FEATURES, CostModel, StepShape, chunk_kv
from chairlift.errors import InvalidParameter
from tests.core.driving import make_request, make_scheduler, step
from tests.core.timed import Noise, Truth, cpu_like, gpu_like, jitter, steady

SHAPE = StepShape(decode_tokens=8, prefill_tokens=64, decode_kv=4000, prefill_kv=20_000, requests=9)


def random_shape(source: random.Random, largest_chunk: int = 512) -> StepShape:
    decodes = source.randint(0, 32)
    chunk = source.randint(1, largest_chunk) if source.random() < 0.5 or not decodes else 0
    prefill_kv = chunk_kv(source.randint(0, 1500), chunk) if chunk else 0
    return StepShape(decodes, chunk, decodes * source.randint(20, 1500), prefill_kv, decodes + (chunk > 0))


def trained(truth: Truth, noise: Noise = steady, steps: int = 400, seed: int = 0) -> CostModel:
    cost, source = CostModel(), random.Random(seed)
    for _ in range(steps):
        shape = random_shape(source)
        cost.observe(shape, truth(shape) * noise())
    return cost


def errors(cost: CostModel, truth: Truth, seed: int = 99) -> list[float]:
    """Sorted relative errors on steps that were not used for training."""
    source = random.Random(seed)
    shapes = [random_shape(source) for _ in range(300)]
    return sorted(abs(cost.predict(shape) / truth(shape) - 1) for shape in shapes)


def test_the_shape_of_a_plan() -> None:
    scheduler = make_scheduler(max_batch_tokens=10)
    scheduler.submit(make_request("a", 4), 0)
    step(scheduler)
    scheduler.submit(make_request("long", 20), 0)
    step(scheduler)
    plan = scheduler.schedule(0.0)  # a's sixth token, and those at 9 to 17 of long
    assert StepShape.of(plan) == StepShape(1, 9, decode_kv=6, prefill_kv=sum(range(10, 19)), requests=2)


@pytest.mark.parametrize("truth", [cpu_like, gpu_like])
def test_unseen_steps_are_predicted(truth: Truth) -> None:
    found = errors(trained(truth), truth)
    assert found[150] < 0.02
    assert found[-15] < 0.2  # the bend at 128 tokens lies between two bends of the model


def test_a_linear_cost_is_learned_exactly() -> None:
    cost = trained(cpu_like)
    assert cost.coefficients["prefill_kv"] == pytest.approx(1e-6, rel=0.01)
    assert cost.coefficients["decode_kv"] == pytest.approx(9e-6, rel=0.01)
    assert cost.coefficients["token"] == pytest.approx(0.002, rel=0.01)
    assert cost.error < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_robust_to_noise_and_pauses(seed: int) -> None:
    cost = trained(cpu_like, jitter(seed, sigma=0.05, pauses=0.03), seed=seed)
    found = errors(cost, cpu_like)
    assert found[150] < 0.05
    assert found[-3] < 0.2
    assert 0.01 < cost.error < 0.1  # the estimate of its own error is right


def test_a_single_pause_hardly_changes_predictions() -> None:
    cost = trained(cpu_like, jitter(0, pauses=0))
    before = cost.predict(SHAPE)
    cost.observe(SHAPE, 50 * before)
    assert cost.predict(SHAPE) < 1.1 * before


def test_a_slower_machine_also_changes_predictions_for_steps_not_seen_since() -> None:
    cost, noise = trained(cpu_like), jitter(0, pauses=0)
    for _ in range(40):
        shape = StepShape(8, 0, 8 * 300, 0, 8)
        cost.observe(shape, 2 * cpu_like(shape) * noise())
    assert cost.predict(SHAPE) == pytest.approx(2 * cpu_like(SHAPE), rel=0.25)


def test_many_decode_steps_do_not_erase_the_cost_of_prompts() -> None:
    cost, noise = trained(cpu_like), jitter(0)
    for length in range(3000):
        shape = StepShape(8, 0, 8 * (100 + length // 4), 0, 8)
        cost.observe(shape, cpu_like(shape) * noise())
    large = StepShape(8, 400, 8 * 500, chunk_kv(1000, 400), 9)
    assert cost.predict(large) == pytest.approx(cpu_like(large), rel=0.15)


def test_after_one_step_more_tokens_are_predicted_to_take_longer() -> None:
    cost = CostModel()
    assert cost.predict(SHAPE) == 0
    cost.observe(StepShape(prefill_tokens=64, prefill_kv=chunk_kv(0, 64), requests=1), 0.1)
    assert cost.predict(StepShape(prefill_tokens=128, prefill_kv=chunk_kv(0, 128), requests=1)) > 0.15


counts = st.integers(0, 2000)
shapes = st.builds(StepShape, counts, counts, st.integers(0, 10**6), st.integers(0, 10**7), st.integers(1, 256))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.floats(1e-5, 100)), min_size=1, max_size=40), shapes)
def test_more_work_is_never_predicted_to_take_less_time(steps: list[tuple[StepShape, float]], shape: StepShape) -> None:
    cost = CostModel()
    for seen, seconds in steps:
        cost.observe(seen, seconds)
    base = cost.predict(shape)
    assert math.isfinite(base)
    assert base >= 0
    more: list[Callable[[StepShape], StepShape]] = [
        lambda s: replace(s, decode_tokens=s.decode_tokens + 1),
        lambda s: replace(s, prefill_tokens=s.prefill_tokens + 300),
        lambda s: replace(s, decode_kv=s.decode_kv + 1000, prefill_kv=s.prefill_kv + 1000),
        lambda s: replace(s, requests=s.requests + 1),
    ]
    for change in more:
        assert cost.predict(change(shape)) >= base * (1 - 1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_invalid_durations_are_ignored(seconds: float) -> None:
    cost = trained(cpu_like)
    before = cost.coefficients
    cost.observe(SHAPE, seconds)
    assert cost.coefficients == before


def test_a_model_made_from_coefficients_predicts_the_same() -> None:
    cost = trained(gpu_like)
    again = CostModel(cost.coefficients)
    assert again.predict(SHAPE) == pytest.approx(cost.predict(SHAPE))


@pytest.mark.parametrize("bad", [{}, dict.fromkeys(FEATURES, -1.0), dict.fromkeys(FEATURES, math.nan)])
def test_coefficients_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter, match="coefficients: "):
        CostModel(bad)

"""Adaptive budgets meet targets under noise, keep throughput high and starve no request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.budgets.base import (
    BUDGETS,
    BatchLoad,
    FixedBudget,
    KneeBudget,
    StepForecast,
    chunk_sizes,
    make_budget,
)
from chairlift.core.budgets.latency import LatencyBudget, tokens_per_second_needed
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import BudgetDecided
from chairlift.core.plan import NO_LIMIT, LimitReason, StepLimits
from chairlift.core.request import Request, Status
from chairlift.errors import InvalidParameter
from tests.core.driving import make_request
from tests.core.timed import (
    Noise,
    TimedRun,
    Truth,
    cpu_like,
    gpu_like,
    jitter,
    long_prompts_among_decodes,
    run_timed,
    steady,
    timed_scheduler,
)

FORMULA = {"token": 0.002, "token_beyond_64": 0, "token_beyond_256": 0, "request": 0.0005, "step": 0.03}
FORMULA |= {"prefill_kv": 1e-6, "decode_kv": 9e-6}
MOST = StepLimits.most(1024, 512)


def trained_cost(largest_prefill: int = 512, largest_decode: int = 64) -> CostModel:
    """A cost model with the coefficients of `cpu_like` and measured steps of up to these sizes."""
    cost = CostModel(FORMULA)
    cost.largest_prefill, cost.largest_decode = largest_prefill, largest_decode
    return cost


def latency_budget(cost: CostModel, target_tpot: float | None, target_ttft: float | None) -> LatencyBudget:
    """A latency budget with targets in seconds."""
    tpot, ttft = (None if target is None else 1e3 * target for target in (target_tpot, target_ttft))
    return LatencyBudget(MOST, cost, tpot, ttft)


def running_request(name: str, prompt: int, computed: int | None = None, arrival: float = 0.0) -> Request:
    """A running request, which decodes if `computed` is not given."""
    request = make_request(name, prompt)
    request.arrival = arrival
    request.status = Status.RUNNING
    if computed is None:
        request.append(1)
    request.start_from(prompt if computed is None else computed)
    return request


def load(decodes: int = 8, context: int = 300, computed: int = 600, now: float = 0.0) -> BatchLoad:
    running = [running_request(f"d{i}", context) for i in range(decodes)]
    return BatchLoad([*running, running_request("long", 1500, computed)], [], now)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def serve(noise: Noise = steady, truth: Truth = cpu_like, prompts: int = 10, **options: float | str | None) -> TimedRun:
    cost = CostModel()
    scheduler = timed_scheduler(cost, **options)  # type: ignore[arg-type]
    start, every = (2.0, 2.0) if truth is cpu_like else (0.1, 0.05)
    return run_timed(scheduler, cost, long_prompts_among_decodes(prompts, start, every), truth, noise)


# ---- the time per output token --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.1, 0.15, 0.3, 0.6])
@pytest.mark.parametrize("computed", [0, 1200])
def test_the_chunk_is_the_largest_that_fits(target: float, computed: int) -> None:
    cost, seen = trained_cost(), load(computed=computed)
    limits = latency_budget(cost, target, None).limits(seen)
    forecast, sizes = StepForecast(cost, seen), chunk_sizes(512)
    assert forecast.seconds(limits.prefill_tokens) <= target
    assert forecast.seconds(sizes[sizes.index(limits.prefill_tokens) + 1]) > target
    assert limits.reason is LimitReason.TPOT
    assert limits.predicted_seconds == forecast.seconds(limits.prefill_tokens)
    assert limits.target_seconds == target


def test_more_decodes_longer_contexts_and_tighter_targets_mean_smaller_chunks() -> None:
    def chunk(target: float = 0.3, **seen: int) -> int:
        return latency_budget(trained_cost(), target, None).limits(load(**seen)).prefill_tokens

    for chunks in (
        [chunk(decodes=n) for n in (1, 4, 16, 40)],
        [chunk(context=n) for n in (10, 200, 1000)],
        [chunk(computed=n) for n in (0, 500, 1400)],
        [chunk(target=seconds) for seconds in (0.6, 0.3, 0.15, 0.1)],
    ):
        assert chunks == sorted(set(chunks), reverse=True)


def test_prompts_get_the_minimum_if_decodes_alone_take_too_long() -> None:
    limits = latency_budget(trained_cost(), 0.01, None).limits(load())
    assert limits.prefill_tokens == 4
    assert limits.reason is LimitReason.FLOOR
    assert limits.slots >= 1


def test_no_request_starves_under_a_target_that_cannot_be_met() -> None:
    done = serve(target_tpot_ms=1.0)
    assert len(done.times) == 18
    assert all(len(times) in (2, 600) for times in done.times.values())
    assert LimitReason.FLOOR in {event.limits.reason for event in done.decisions}


@pytest.mark.parametrize("target", [0.12, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_targets_are_met_under_noise_with_nearly_the_throughput_of_the_best_fixed_chunk(
    target: float, seed: int
) -> None:
    """Compared with every fixed chunk whose 99th percentile of inter-token times is within 1.2 x target too."""
    adaptive = serve(jitter(seed), target_tpot_ms=target * 1e3)
    assert percentile(adaptive.gaps("run"), 0.99) <= 1.2 * target
    fixed = [serve(jitter(seed), budget="fixed", cap=chunk) for chunk in (8, 16, 32, 48, 64, 96, 128)]
    valid = [one for one in fixed if percentile(one.gaps("run"), 0.99) <= 1.2 * target]
    assert valid
    best = max(one.busy_tokens_per_second() for one in valid)
    assert adaptive.busy_tokens_per_second() >= 0.95 * best


@pytest.mark.parametrize("target", [0.006, 0.01])
def test_targets_are_met_with_a_nonlinear_step_time(target: float) -> None:
    done = serve(jitter(1), gpu_like, cap=2048, target_tpot_ms=target * 1e3)
    assert percentile(done.gaps("run"), 0.99) <= 1.2 * target
    chunks = [shape.prefill_tokens for shape, _ in done.steps if shape.decode_tokens and shape.prefill_tokens]
    assert max(chunks) > 100


def test_chunks_shrink_on_a_slower_machine_to_meet_the_target() -> None:
    noise, steps = jitter(0, pauses=0), 0

    def slowing() -> float:
        nonlocal steps
        steps += 1
        return noise() * (1.0 if steps < 150 else 1.6)

    done = serve(slowing, prompts=20, target_tpot_ms=250)
    settled = [seconds for shape, seconds in done.steps[200:] if shape.decode_tokens and shape.prefill_tokens]
    assert percentile(settled, 0.99) <= 1.2 * 0.25
    assert percentile(settled, 0.5) >= 0.8 * 0.25  # and the target is used up


def test_chunks_start_small_and_double_while_nothing_is_measured() -> None:
    cost = CostModel()
    budget = latency_budget(cost, 10.0, None)
    chunks = []
    for _ in range(6):
        limits = budget.limits(load())
        chunks.append(limits.prefill_tokens)
        shape = StepShape(8, limits.prefill_tokens, 2400, 600 * limits.prefill_tokens, 9)
        cost.observe(shape, cpu_like(shape))
    assert chunks == [32, 64, 128, 256, 512, 512]
    assert limits.reason is LimitReason.FIXED


def test_without_decodes_chunks_are_not_limited() -> None:
    limits = latency_budget(trained_cost(), 0.1, None).limits(load(decodes=0))
    assert (limits.prefill_tokens, limits.reason) == (512, LimitReason.ALONE)


def test_without_prompts_the_last_decision_stays() -> None:
    budget = latency_budget(trained_cost(), 0.1, None)
    before = budget.limits(load())
    decodes_only = BatchLoad([running_request("d", 900)], [], 0.0)
    assert budget.limits(decodes_only) is before


# ---- the batch size -------------------------------------------------------------------------------------------------


def test_slots_are_limited_to_meet_the_target() -> None:
    seen = BatchLoad([running_request(f"d{i}", 299) for i in range(8)], [running_request("next", 300, 0)], 0.0)
    slots = latency_budget(trained_cost(), 0.2, None).limits(seen).slots
    assert cpu_like(StepShape(slots, 16, slots * 300, 0, slots + 1)) <= 0.2
    assert cpu_like(StepShape(slots + 1, 16, (slots + 1) * 300, 0, slots + 2)) > 0.2


@pytest.mark.parametrize("seed", range(3))
def test_a_flood_of_requests_is_not_admitted_beyond_the_target(seed: int) -> None:
    def flood(**options: float | None) -> TimedRun:
        cost = CostModel()
        scheduler = timed_scheduler(cost, slots=64, **options)  # type: ignore[arg-type]
        arfixed = [(0.05 * i, make_request(f"run{i}", 30, new=40)) for i in range(120)]
        return run_timed(scheduler, cost, arfixed, cpu_like, jitter(seed, pauses=0))

    free, bound = flood(), flood(target_tpot_ms=120)
    assert max(shape.decode_tokens for shape, _ in free.steps) == 64
    assert percentile(free.gaps(), 0.99) > 1.2 * 0.12
    assert percentile(bound.gaps(), 0.99) <= 1.2 * 0.12
    assert 16 < max(shape.decode_tokens for shape, _ in bound.steps) < 40  # with 16 prompt tokens, 19 would take 120 ms
    assert len(bound.times) == 120


def test_without_target_tpot_slots_are_not_limited() -> None:
    assert latency_budget(trained_cost(), None, 1.0).limits(load()).slots == NO_LIMIT
    assert KneeBudget(MOST, trained_cost()).limits(load()).slots == NO_LIMIT


# ---- the time to the first token ------------------------------------------------------------------------------------


def test_the_speed_needed_for_first_tokens() -> None:
    first, second, third = (running_request(name, 100, 0, arrival) for name, arrival in (("a", 0), ("b", 1), ("c", 8)))
    assert tokens_per_second_needed([first, second], now=2, target_ttft=10) == 200 / 9
    assert tokens_per_second_needed([first, second, third], now=2, target_ttft=4) == 200 / 3
    assert tokens_per_second_needed([first], now=10, target_ttft=10) == float("inf")
    again = running_request("d", 100, 0)  # preempted after its first token, so its TTFT no longer matters
    again.append(1)
    assert tokens_per_second_needed([again], now=10, target_ttft=10) == 0


@pytest.mark.parametrize("target", [5.0, 8.0, 20.0])
def test_the_chunk_is_the_smallest_that_meets_target_ttft(target: float) -> None:
    cost, seen = trained_cost(), load(computed=0)
    limits = latency_budget(cost, None, target).limits(seen)
    forecast, sizes = StepForecast(cost, seen), chunk_sizes(512)
    smaller = sizes[sizes.index(limits.prefill_tokens) - 1]
    assert 1500 / limits.prefill_tokens * forecast.seconds(limits.prefill_tokens) <= target
    assert 1500 / smaller * forecast.seconds(smaller) > target
    assert limits.reason is LimitReason.TTFT


def test_a_late_request_gets_the_fastest_chunk() -> None:
    limits = latency_budget(trained_cost(), None, 0.5).limits(load())
    assert limits.reason is LimitReason.LATE
    assert limits.prefill_tokens > 100


def test_target_ttft_is_met_with_shorter_steps_than_a_fixed_budget() -> None:
    cost = CostModel()
    scheduler = timed_scheduler(cost, target_ttft_ms=8000)
    arfixed = long_prompts_among_decodes(5, 3.0, 9.0)
    kept = run_timed(scheduler, cost, arfixed, cpu_like, jitter(0, pauses=0))
    waits = [kept.first_token(f"long{i}") - (3.0 + 9.0 * i) for i in range(5)]
    assert max(waits) <= 1.05 * 8.0
    unlimited = serve(jitter(0, pauses=0), budget="fixed", cap=512, prompts=5)
    assert percentile(kept.gaps("run"), 0.99) < 0.5 * percentile(unlimited.gaps("run"), 0.99)


def test_with_both_targets_late_prompts_get_the_largest_chunk_within_target_tpot() -> None:
    budget = latency_budget(trained_cost(), 0.8, 8.0)
    fits = latency_budget(trained_cost(), 0.8, None).limits(load(computed=0)).prefill_tokens
    early = budget.limits(load(computed=0, now=0.0))
    late = budget.limits(load(computed=0, now=7.5))
    assert early.prefill_tokens < late.prefill_tokens == fits
    assert late.reason is LimitReason.TPOT


# ---- the knee -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("truth", "least", "most"), [(cpu_like, 60, 300), (gpu_like, 128, 1400)])
def test_the_knee_is_nearly_as_fast_with_much_shorter_steps(truth: Truth, least: int, most: int) -> None:
    knee = serve(jitter(0, pauses=0), truth, budget="knee", cap=2048)
    large = serve(jitter(0, pauses=0), truth, budget="fixed", cap=2048)
    chunks = [
        event.limits.prefill_tokens
        for event in knee.decisions
        if event.limits.reason is LimitReason.KNEE or event.limits.reason is LimitReason.SHORT
    ]
    assert least <= percentile([float(chunk) for chunk in chunks], 0.5) <= most
    assert knee.busy_tokens_per_second() >= 0.8 * large.busy_tokens_per_second()
    assert knee.seconds < 1.05 * large.seconds
    assert max(knee.gaps("run")) < 0.7 * max(large.gaps("run"))


def test_the_knee_bounds_a_step_by_its_decodes_and_keeps_prompts_moving() -> None:
    cost = trained_cost()
    for decodes in (1, 8, 60):
        for computed in (0, 600, 1400):
            given = load(decodes, computed=computed)
            limits, forecast = KneeBudget(MOST, cost).limits(given), StepForecast(cost, given)
            speed = forecast.prompt_tokens_per_second
            slowest = forecast.seconds(limits.prefill_tokens) / forecast.seconds(0)
            share = speed(limits.prefill_tokens) / max(map(speed, range(1, 513)))
            assert slowest <= 5.5 or share < 0.72
            assert share >= 0.7
            assert limits.reason in (LimitReason.SHORT, LimitReason.KNEE)
    assert KneeBudget(MOST, cost).limits(load(0)).reason is LimitReason.ALONE


# ---- construction --------------------------------------------------------------------------------------------------


def test_budgets_by_name() -> None:
    cost = CostModel()
    made = [make_budget(name, cost, max_batch_tokens=8) for name in (None, "fixed", "knee")]
    assert [type(one) for one in made] == [FixedBudget, FixedBudget, KneeBudget]
    for name in (None, "latency"):
        assert isinstance(make_budget(name, cost, max_batch_tokens=8, target_ttft_ms=5), LatencyBudget)
    assert set(BUDGETS.names()) == {"fixed", "knee", "latency", "slack"}


@pytest.mark.parametrize(
    ("name", "targets", "problem"),
    [
        ("endless", {}, "budget: unknown budget 'endless'"),
        ("latency", {}, "budget: latency needs a target"),
        ("knee", {"target_tpot_ms": 5}, "target_tpot_ms: only goes with budget latency, not 'knee'"),
        ("fixed", {"target_ttft_ms": 5}, "target_ttft_ms: only goes with budget latency, not 'fixed'"),
        (None, {"target_tpot_ms": 0}, "target_tpot_ms: "),
        (None, {"target_tpot_ms": float("nan")}, "target_tpot_ms: "),
        (None, {"target_ttft_ms": "soon"}, "target_ttft_ms: "),
        (None, {"target_ttft_ms": True}, "target_ttft_ms: "),
    ],
)
def test_contradictory_options_are_refused(name: str | None, targets: dict[str, float], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        make_budget(name, CostModel(), max_batch_tokens=8, **targets)


@given(st.integers(1, 20_000))
def test_chunk_sizes_rise_to_the_cap_in_small_steps(most: int) -> None:
    sizes = chunk_sizes(most)
    assert sizes[-1] == most
    assert sizes[0] == min(4, most)
    for one, following in pairwise(sizes):
        assert one < following <= max(one + 1, one * 17 / 16)


@pytest.mark.parametrize("options", [{"target_tpot_ms": 400}, {"target_ttft_ms": 100}, {"budget": "knee"}])
def test_the_configured_limits_are_never_exceeded(options: dict[str, float | str]) -> None:
    done = serve(jitter(0), cap=48, prompts=3, **options)  # type: ignore[arg-type]
    assert max(shape.prefill_tokens for shape, _ in done.steps) == 48
    assert all(isinstance(event, BudgetDecided) and event.limits.prefill_tokens <= 48 for event in done.decisions)

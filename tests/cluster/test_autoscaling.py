"""The autoscaler, alone and in front of simulated replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait
from chairlift.cluster.routing.router import Router
from chairlift.core.cost_model import StepShape
from chairlift.core.targets import Targets
from chairlift.errors import InvalidParameter
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.simulator.outcome import Arrival, SimulationOutcome, figures
from chairlift_lab.simulator.simulation import AutoscaledSize, simulate
from chairlift_lab.simulator.step_cost import LinearCost

SETTINGS = AutoscalingSettings(max_replicas=10, cold_start=10, down_delay=60)


def seen(ready: int, *, wait: float = 0.0, used: float = 0.0, tpot: float | None = None) -> FleetObservation:
    return FleetObservation(ready, wait, used, tpot, open_requests=1)


def test_the_fleet_grows_in_proportion_to_the_memory_in_use() -> None:
    assert Autoscaler(SETTINGS).desired(seen(4, used=0.7), 0.0) == 4
    assert Autoscaler(SETTINGS).desired(seen(4, used=0.71), 0.0) == 5
    assert Autoscaler(SETTINGS).desired(seen(4, used=0.9), 0.0) == 6


def test_waiting_requests_and_slow_tokens_make_the_fleet_grow() -> None:
    assert Autoscaler(SETTINGS).desired(seen(2, wait=1.4), 0.0) == 3
    assert Autoscaler(SETTINGS).desired(seen(2, wait=100.0), 0.0) == 4, "at most twice as many at once"
    slow = AutoscalingSettings(max_replicas=10, target_tpot=0.03)
    assert Autoscaler(slow).desired(seen(2, tpot=0.04), 0.0) == 3
    assert Autoscaler(SETTINGS).desired(seen(2, tpot=0.04), 0.0) == 2


def test_the_trend_is_extrapolated_by_the_cold_start() -> None:
    """Memory in use grows by 0.4 replicas' worth in 10 s, so that 2.0 will be in use when a new replica is ready."""
    scaler = Autoscaler(SETTINGS)
    assert scaler.desired(seen(2, used=0.6), 0.0) == 2
    assert scaler.desired(seen(2, used=0.8), 10.0) == 3
    patient = Autoscaler(AutoscalingSettings(max_replicas=10, cold_start=60))
    patient.desired(seen(2, used=0.4), 0.0)
    assert patient.desired(seen(2, used=0.6), 10.0) == 4


def test_the_fleet_shrinks_after_a_delay_and_not_to_a_size_under_pressure() -> None:
    scaler = Autoscaler(SETTINGS)
    assert scaler.desired(seen(8, used=0.7), 0.0) == 8
    assert scaler.desired(seen(8, used=0.28), 59.0) == 8
    assert scaler.desired(seen(8, used=0.28), 61.0) == 7
    quiet = Autoscaler(AutoscalingSettings(down_delay=0))
    quiet.desired(seen(2, used=0.3), 0.0)
    assert quiet.desired(seen(2, used=0.3), 1.0) == 2, "one replica would be at 0.6 of a target of 0.7"


def test_the_fleet_shrinks_by_a_fifth_at_a_time() -> None:
    scaler, ready, sizes = Autoscaler(AutoscalingSettings(max_replicas=100, down_delay=60)), 100, []
    for now in range(0, 600, 5):
        ready = scaler.desired(seen(ready, used=0.35 * 60 / ready), float(now))
        sizes.append(ready)
    assert sorted(set(sizes), reverse=True) == [100, 80, 64, 52, 42, 38]
    assert sizes == sorted(sizes, reverse=True)


def test_the_fleet_shrinks_to_nothing_only_if_allowed() -> None:
    nothing = FleetObservation(1, 0.0, 0.0)
    assert Autoscaler(SETTINGS).desired(nothing, 0.0) == 1
    none_needed = AutoscalingSettings(min_replicas=0, down_delay=0)
    scaler = Autoscaler(none_needed)
    scaler.desired(nothing, 0.0)
    assert scaler.desired(nothing, 1.0) == 0
    assert Autoscaler(none_needed).desired(FleetObservation(0, 0.1, 0.0, open_requests=1), 0.0) == 1


@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(0, 50), st.floats(0, 1)), min_size=1, max_size=30),
    st.integers(0, 3),
    st.integers(3, 9),
)
def test_the_size_stays_between_its_bounds(rows: list[tuple[int, float, float]], low: int, high: int) -> None:
    scaler = Autoscaler(AutoscalingSettings(min_replicas=low, max_replicas=high))
    for index, (ready, wait, used) in enumerate(rows):
        assert low <= scaler.desired(seen(ready, wait=wait, used=used), index * 5.0) <= high


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("min_replicas", {"min_replicas": 9, "max_replicas": 8}),
        ("min_replicas", {"min_replicas": -1}),
        ("target_ttft", {"target_ttft": 0.0}),
        ("target_used", {"target_used": float("nan")}),
        ("cold_start", {"cold_start": -1.0}),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, settings: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        AutoscalingSettings(**settings)  # type: ignore[arg-type]
    assert caught.value.parameter == name


def test_a_few_long_waits_count_in_small_fleets_only() -> None:
    assert fleet_wait([]) == 0
    assert fleet_wait([0.1, 9.0, 0.2]) == 9
    assert fleet_wait([9.0] * 5 + [0.1] * 95) == 0.1
    assert fleet_wait([9.0] * 6 + [0.1] * 94) == 9


class Linear(LinearCost):
    """A step takes 10 ms, plus 1 ms per token."""

    seconds_per_position = 0.0

    def predict(self, shape: StepShape) -> float:
        return 0.010 + 0.001 * shape.tokens


def burst() -> list[Arrival]:
    """A request every second, then ten per second for a minute, then one per second again."""
    times = [float(at) for at in range(60)] + [60 + at / 10 for at in range(600)] + [120.0 + at for at in range(200)]
    return [Arrival(at, [index] * 100, 100) for index, at in enumerate(times)]


def run(settings: AutoscalingSettings | None, replicas: int) -> SimulationOutcome:
    engine = ReplicaSettings(num_blocks=400, max_batch_tokens=256)
    size = AutoscaledSize(settings, lambda index: engine.make(Linear())) if settings else None
    return simulate(burst(), [engine.make(Linear()) for _ in range(replicas)], Router("least-loaded"), size=size)


def test_an_autoscaled_fleet_is_faster_than_a_small_one_and_cheaper_than_a_large_one() -> None:
    settings = AutoscalingSettings(max_replicas=6, cold_start=10, down_delay=30)
    small, scaled, large = (
        figures(run(chosen, replicas), Targets()) for chosen, replicas in ((None, 1), (settings, 1), (None, 6))
    )
    assert small["requests"] == scaled["requests"] == large["requests"] == 860
    assert scaled["ttft_p95_ms"] < 0.5 * small["ttft_p95_ms"]
    assert 1 < scaled["mean_replicas"] < 4
    assert (small["mean_replicas"], large["mean_replicas"]) == (1, 6)


def test_requests_wait_for_the_first_replica_of_an_empty_fleet() -> None:
    settings = AutoscalingSettings(min_replicas=0, max_replicas=2, cold_start=10, down_delay=20)
    engine = ReplicaSettings(num_blocks=400)
    arrivals = [Arrival(1.0, [1] * 10, 5), Arrival(200.0, [2] * 10, 5)]
    size = AutoscaledSize(settings, lambda index: engine.make(Linear()))
    outcome = simulate(arrivals, [], Router("round-robin"), size=size)
    assert len(outcome.records) == 2
    assert all(10 <= record.ttft <= 16 for record in outcome.records), "each met an empty fleet and a cold start"
    assert outcome.replica_seconds < 0.5 * outcome.seconds


def test_a_simulated_fleet_grows_for_the_time_per_token() -> None:
    relaxed = AutoscalingSettings(max_replicas=6, target_ttft=1e3, target_used=1e3, cold_start=10)
    without, with_target = (run(settings, 1) for settings in (relaxed, replace(relaxed, target_tpot=0.02)))
    assert without.replica_seconds == pytest.approx(without.seconds)
    assert with_target.replica_seconds > 1.5 * with_target.seconds

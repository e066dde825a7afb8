"""Step costs fitted to measured steps, and the simulation of a recorded run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.cost_model import StepShape
from chairlift.errors import InvalidParameter
from chairlift_lab.planning.recording import COMPARED, RecordedRun, compare
from chairlift_lab.simulator.step_cost import MeasuredCost, SpeedCursor, SpeedProfile

RECORDED = sorted((Path(__file__).parent / "data").glob("*.json"))
assert RECORDED
TRUE = MeasuredCost(
    step=4e-3, request=2e-4, prefill_kv=2e-8, decode_kv=1e-6, tokens=((0, 1e-3), (1, 2e-4), (8, 9e-4), (64, 5e-4))
)


def random_shape(rng: random.Random) -> StepShape:
    decodes, prompts = rng.randint(0, 16), rng.choice([0, 0, rng.randint(1, 300)])
    if not decodes and not prompts:
        decodes = 1
    kv = rng.randint(1, 500)
    return StepShape(decodes, prompts, decodes * kv, prompts * kv, decodes + (prompts > 0))


@pytest.mark.parametrize(("noise", "outliers", "allowed"), [(0.0, 0.0, 0.005), (0.05, 0.0, 0.03), (0.05, 0.05, 0.05)])
def test_a_fit_recovers_the_cost_of_steps(noise: float, outliers: float, allowed: float) -> None:
    """Also with noise, and with outliers of five times the duration, which count as three times."""
    rng = random.Random(3)
    steps = []
    for _ in range(600):
        shape = random_shape(rng)
        factor = 5.0 if rng.random() < outliers else rng.gauss(1, noise)
        steps.append((shape, TRUE.predict(shape) * factor))
    fitted = MeasuredCost.fit(steps)
    expected = 1 + 2 * outliers
    errors = sorted(abs(fitted.predict(shape) / (expected * TRUE.predict(shape)) - 1) for shape, _ in steps)
    assert errors[len(errors) * 95 // 100] < 2 * allowed
    assert sum(errors) / len(errors) < allowed


def test_lateness_is_measured_separately_for_steps_with_prompts() -> None:
    rng, steps = random.Random(5), []
    for index in range(800):
        shape = random_shape(rng)
        seconds = TRUE.predict(shape)
        late = not shape.prefill_tokens and index % 5 == 0  # some of the steps with decodes only
        steps.append((shape, 2 * seconds if late else seconds))
    fitted = MeasuredCost.fit(steps)
    assert fitted.late_prompts == pytest.approx(1.0, abs=0.02)
    assert fitted.late_decodes == pytest.approx(1.2, abs=0.05)
    decode = StepShape(decode_tokens=3, decode_kv=600, requests=3)
    longer = StepShape(decode_tokens=3, decode_kv=700, requests=3)
    difference = fitted.predict(longer) - fitted.predict(decode)
    assert difference == pytest.approx(100 * fitted.seconds_per_position)


def test_costs_are_extrapolated_beyond_the_measured_steps() -> None:
    fitted = MeasuredCost.fit([(StepShape(prefill_tokens=n, requests=1), 1e-3 * n) for n in range(1, 200)])
    assert fitted.predict(StepShape(prefill_tokens=2000, requests=1)) == pytest.approx(2.0, rel=0.02)


def test_costs_are_saved_as_json_and_invalid_ones_are_refused() -> None:
    assert MeasuredCost.from_json(TRUE.to_json()) == TRUE
    for change in ({"step": -1.0}, {"request": None}, {"tokens": [[1, 0.1]]}, {"tokens": []}):
        with pytest.raises(InvalidParameter):
            MeasuredCost.from_json(TRUE.to_json() | change)


def test_a_profile_records_when_the_machine_was_slow() -> None:
    rng, steps = random.Random(7), []
    for index in range(900):
        shape = random_shape(rng)
        steps.append((shape, (1.5 if 300 <= index < 600 else 1.0) * TRUE.predict(shape)))
    fitted = MeasuredCost.fit(steps)
    assert MeasuredCost.from_json(fitted.to_json()).pace == fitted.pace
    assert fitted.pace is not None
    cursor = SpeedCursor(fitted.pace)
    took = cursor.look_ahead([fitted.predict(shape) for shape, _ in steps])
    for began in (0, 300, 600):
        part = slice(began, began + 300)
        assert sum(took[part]) == pytest.approx(sum(seconds for _, seconds in steps[part]), rel=1e-3)


@given(
    pieces=st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 10**5)), min_size=1, max_size=6),
    begin=st.floats(0, 1),
    work=st.lists(st.floats(0, 0.3), max_size=12),
)
def test_a_cursor_moves_along_its_profile(pieces: list[tuple[int, int]], begin: float, work: list[float]) -> None:
    """Time is monotonic, looking ahead changes nothing, and a full cycle takes as long as all pieces."""
    pace = SpeedProfile.from_json(pieces)
    cursor = SpeedCursor(pace, begin)
    expected = cursor.look_ahead(work)
    half = len(work) // 2
    cursor.advance_steps(half)
    assert [cursor.advance(one) for one in work[half:]] == expected[half:]
    assert all(seconds > -1e-9 for seconds in expected)
    assert cursor.advance(pace.total_work) == pytest.approx(sum(took for _, took in pieces) * 1e-6, rel=1e-6)


@pytest.mark.parametrize("pieces", [(), ((0.0, 1.0),), ((1.0, 0.0),), ((1.0, -1.0),)])
def test_a_profile_without_progress_is_refused(pieces: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidParameter):
        SpeedProfile(pieces)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_is_reproduced_within_a_tenth(path: Path) -> None:
    """Throughput and latency percentiles; the recording has all times, so no clock is read."""
    rows = compare(RecordedRun.load(path))
    assert [row["name"] for row in rows] == list(COMPARED)
    assert {row["name"]: row["error"] for row in rows if abs(row["error"]) > 0.1} == {}

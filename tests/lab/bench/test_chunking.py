"""`bench chunking` on a tiny model: the traffic has the documented form, and the comparison follows its rule."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.core.events import StepDone
from chairlift.core.executor import PendingStep
from chairlift.core.plan import StepPlan, StepTiming
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidParameter
from chairlift_lab.bench import claims
from chairlift_lab.bench.chunking import ChunkingPoint, best_fixed, chunking_rows, sweep_chunks
from chairlift_lab.bench.claims import measure_stalls, random_maker
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.long_prompts import (
    ChunkingRun,
    ChunkingSettings,
    TurnClock,
    engine_for_long_prompts,
    run_long_prompts,
)
from tests.tiny import write_tiny_checkpoint

SMALL = ChunkingSettings(decodes=3, start=5, output=60, prompts=2, prompt_len=100)
DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def maker(folder: str) -> EngineMaker:
    return EngineMaker.load(folder, {"device": "cpu"})


def measure(maker: EngineMaker, chunk: int, settings: ChunkingSettings = SMALL) -> ChunkingRun:
    engine = engine_for_long_prompts(maker, settings, max_batch_tokens=64, max_prefill_tokens=chunk)
    run = run_long_prompts(engine, maker.vocabulary(), settings)
    assert not engine.has_work
    return run


def test_every_measured_step_has_all_decodes_and_a_chunk(maker: EngineMaker) -> None:
    run = measure(maker, chunk=25)
    assert [(step.decode_tokens, step.prefill_tokens) for step in run.steps] == [(3, 25)] * 8
    assert run.tokens == 8 * 28
    assert len(run.gaps) == 8 * 3
    assert len(run.first_tokens) == 2
    assert sum(run.first_tokens) <= run.seconds
    assert max(run.gaps) <= run.seconds


def test_a_finished_request_is_replaced(maker: EngineMaker) -> None:
    settings = ChunkingSettings(decodes=2, start=5, output=10, prompts=4, prompt_len=100)
    run = measure(maker, chunk=10, settings=settings)
    assert max(step.requests for step in run.steps) == 3
    assert sum(step.decode_tokens for step in run.steps) > 2 * 10
    assert len(run.first_tokens) == 4


def test_all_settings_do_the_same_work(maker: EngineMaker) -> None:
    noted: list[str] = []
    points = sweep_chunks(maker, SMALL, chunks=[10, 50], targets=[0.5], note=noted.append)
    assert [point.name for point in points] == ["chunk 10", "chunk 50", "target 500 ms", "knee"]
    assert noted[0] == "round 1 of 1: warming up"
    names = [point.name for point in points]
    assert noted[1:] == [f"round 1 of 1: prompt {turn} of 2, {name}" for turn in (1, 2) for name in names]
    for point in points:
        assert len(point.run.first_tokens) == 2
        assert sum(point.run.first_tokens) <= point.run.seconds
        assert sum(step.prefill_tokens for step in point.run.steps) == 2 * 100
        assert max(step.prefill_tokens for step in point.run.steps) <= (point.chunk or 50)


def test_every_round_has_new_engines_and_figures_cover_all_rounds(maker: EngineMaker) -> None:
    points = sweep_chunks(maker, replace(SMALL, rounds=2), chunks=[50], targets=[0.5])
    for point, row in zip(points, chunking_rows(points), strict=True):
        one, other = point.rounds
        assert point.run.gaps == one.gaps + other.gaps
        assert point.tokens_per_s == (one.tokens + other.tokens) / (one.seconds + other.seconds)
        assert row["tokens_per_s_rounds"] == [one.tokens / one.seconds, other.tokens / other.seconds]
        assert len(row["itl_p99_ms_rounds"]) == 2


def test_a_clock_stops_between_its_turns() -> None:
    times = iter([10.0, 12.0, 13.0, 100.0, 101.0, 104.0])
    clock = TurnClock(lambda: next(times))
    assert clock() == 0
    with clock:
        assert clock() == 2
    assert clock() == 3
    with clock:
        assert clock() == 4
    assert clock() == clock() == 7


def test_without_targets_two_are_found(maker: EngineMaker) -> None:
    points = sweep_chunks(maker, SMALL, chunks=[4, 10, 25, 50])
    targets = [point.target for point in points if point.target is not None]
    assert 1 <= len(targets) <= 2
    assert all(0 < target < 10 for target in targets)


def pretend(name: str, gaps: list[float], tokens: int, **kind: float) -> ChunkingPoint:
    step = StepDone(0, 0, 3, 20, 4, 0, 1, 9, 0, 0, StepTiming(), seconds=0.2, predicted_seconds=0.25)
    run = ChunkingRun(seconds=2.0, tokens=tokens, gaps=gaps, first_tokens=[1.0, 3.0], steps=[step])
    return ChunkingPoint(name, [run], **kind)  # type: ignore[arg-type]


def test_a_target_is_met_by_the_median_and_the_tail_for_adaptive_and_fixed_chunks() -> None:
    inside = pretend("chunk 8", [0.08] * 99 + [0.5], 100, chunk=8)
    better = pretend("chunk 16", [0.1] * 95 + [0.12] * 5, 200, chunk=16)
    long_tail = pretend("chunk 32", [0.09] * 97 + [0.13] * 3, 300, chunk=32)
    slow = pretend("chunk 64", [0.11] * 100, 400, chunk=64)
    adaptive = pretend("target 100 ms", [0.1] * 100, 190, target=0.1)
    points = [inside, better, long_tail, slow, adaptive]
    assert [point.meets(0.1) for point in points] == [True, True, False, False, True]
    assert best_fixed(points, 0.1) is better
    assert best_fixed(points, 0.01) is None
    *fixed, row = chunking_rows(points)
    assert (row["meets_target"], row["best_fixed"]) == (True, 16)
    assert row["throughput_vs_best_fixed"] == pytest.approx(0.95)
    assert row["prediction_error_p50"] == pytest.approx(0.25)
    assert row["ttft_p50_ms"] == 2000
    assert all(one["meets_target"] is None and one["best_fixed"] is None for one in fixed)


def test_the_stall_of_a_long_prompt_shrinks_with_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts tokens."""

    def run(engine: Engine, *arguments: Any, **options: Any) -> ChunkingRun:
        computed, compute = 0.0, engine.executor.launch

        def counting(plan: StepPlan) -> PendingStep:
            nonlocal computed
            computed += plan.num_tokens
            return compute(plan)

        monkeypatch.setattr(engine.executor, "launch", counting)
        monkeypatch.setattr(engine, "clock", lambda: computed)
        return run_long_prompts(engine, *arguments, **options)

    monkeypatch.setattr(claims, "run_long_prompts", run)
    whole, small = measure_stalls(random_maker("cpu"), prompt_len=1000, chunks=[64], decodes=2)
    assert (whole["chunk"], whole["worst_gap"], whole["first_token"]) == (None, 1002, 1002)
    assert (small["chunk"], small["worst_gap"], small["first_token"]) == (64, 66, 1000 + 2 * 16)


def test_invalid_settings_are_refused_by_name(maker: EngineMaker) -> None:
    with pytest.raises(InvalidParameter, match="decodes"):
        ChunkingSettings(decodes=0)
    for chunks in ([], [0, 5], [5, 5]):
        with pytest.raises(InvalidParameter, match="chunks"):
            sweep_chunks(maker, SMALL, chunks=chunks)
    for settings, parameter in (
        (ChunkingSettings(decodes=1, output=10, prompt_len=256), "prompt_len"),
        (ChunkingSettings(decodes=1, start=10, output=250, prompt_len=20), "output"),
    ):
        with pytest.raises(InvalidParameter, match=parameter):
            measure(maker, 10, settings)


def test_the_command(folder: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "a.json", tmp_path / "a.png"
    small = [f"--{name.replace('_', '-')}={getattr(SMALL, name)}" for name in ChunkingSettings.__dataclass_fields__]
    outputs = ["--json", str(figures), "--plot", str(picture), "--chunks", "20,50", "--targets-ms", "1,500"]
    made = CliRunner().invoke(app, ["bench", "chunking", "--model", folder, "--device", "cpu", *small, *outputs])
    assert made.exit_code == 0, made.output
    written = json.loads(figures.read_text())
    assert [row["name"] for row in written["rows"]] == ["chunk 20", "chunk 50", "target 1 ms", "target 500 ms", "knee"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert set(written["rows"][0]) | set(written["settings"]) <= documented
    refused = CliRunner().invoke(app, ["bench", "chunking", "--target-tpot-ms", "5"])
    assert refused.exit_code == 2
    assert "--target-tpot-ms" in refused.output

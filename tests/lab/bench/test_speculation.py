"""`chairlift bench speculation` on a tiny model: its counts are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench import speculation
from chairlift_lab.bench.speculation import PLAIN, TWIN, SpeculationSettings, compare_speculation
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.workload import SCENARIOS
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", positions=2048)


def test_a_model_that_drafts_for_itself_is_always_right_and_takes_fewer_steps(folder: Path) -> None:
    maker = EngineMaker.load(str(folder), {"device": "cpu", "kv_memory": "8MiB"})
    settings = SpeculationSettings(
        proposers=(f"draft:{folder}",), scenarios=("chat",), batches=(1, 3), tokens=16, rounds=2, draft_length=3
    )
    points = compare_speculation(maker, settings)
    assert [(point.batch, point.proposer) for point in points] == [
        (batch, name) for batch in (1, 3) for name in (PLAIN, TWIN, f"draft:{folder}")
    ]
    for plain, twin, fast in zip(points[::3], points[1::3], points[2::3], strict=True):
        assert plain.speedups == [1.0, 1.0]
        assert twin.steps == plain.steps
        row: dict[str, Any] = fast.row()
        assert row["same_output"]
        assert row["acceptance"] == 1.0
        assert row["acceptance_by_place"] == [1.0, 1.0, 1.0]
        assert 2.5 < row["mean_accepted_length"] <= 3.0
        assert fast.steps < plain.steps / 2
        assert len(row["output_tokens_per_s_rounds"]) == len(row["speedup_rounds"]) == 2
        assert plain.row()["acceptance"] is None


def test_no_engine_gets_ahead_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with several tokens per step wait for the others, so that noise affects the same tokens of all."""
    maker = EngineMaker.load(str(folder), {"device": "cpu", "kv_memory": "8MiB"})
    settings = SpeculationSettings(
        proposers=(f"draft:{folder}",), scenarios=("chat",), batches=(2,), tokens=16, rounds=1, draft_length=3
    )
    ahead = []
    take_turns = speculation._take_turns

    def recorded(runs: list[Any]) -> None:
        step = speculation._Run.step

        def recorded_step(run: Any) -> None:
            step(run)
            ahead.append(run.num_tokens - min(other.num_tokens for other in runs if not other.done or other is run))

        monkeypatch.setattr(speculation._Run, "step", recorded_step)
        take_turns(runs)
        monkeypatch.setattr(speculation._Run, "step", step)

    monkeypatch.setattr(speculation, "_take_turns", recorded)
    compare_speculation(maker, settings)
    assert 2 < max(ahead) <= 2 * (1 + 3), "at most the tokens of one step: two requests, three drafts each"


def test_the_command_writes_its_results_to_files(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "speculation", "--model", str(folder), "--device", "cpu", "--kv-memory", "8MiB", "--quiet"]
    words += ["--scenarios", "quotes", "--batches", "2", "--tokens", "8", "--rounds", "1"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    result = CliRunner().invoke(app, words + files, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["bench"] == "speculation"
    assert [row["proposer"] for row in report["rows"]] == [PLAIN, TWIN, "ngram"]
    assert all(row["same_output"] for row in report["rows"])
    assert "quotes" in (tmp_path / "out.svg").read_text()


def test_the_requests_of_a_scenario_differ() -> None:
    for text in SCENARIOS.values():
        assert len({text(index) for index in range(64)}) > 7


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"scenarios": ("poetry",)}, "scenarios"),
        ({"batches": (0,)}, "batches"),
        ({"proposers": (PLAIN,)}, "proposers"),
        ({"proposers": (TWIN,)}, "proposers"),
        ({"tokens": 0}, "tokens"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        SpeculationSettings(**options)
    assert error.value.parameter == parameter

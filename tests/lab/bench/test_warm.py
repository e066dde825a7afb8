"""`bench warm` on a tiny model: it counts the tokens that differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.bench import warm
from chairlift_lab.bench.warm import WAYS, Answers, WarmRun, WarmSettings, compare_answers
from chairlift_lab.common.engines import EngineMaker
from tests.tiny import write_tiny_checkpoint

SMALL = WarmSettings(chats=5, answer=4, others=3, chunk=11)
DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", positions=2048))


def test_the_command_finds_no_difference(folder: str, tmp_path: Path) -> None:
    figures = tmp_path / "a.json"
    small = [f"--{name}={getattr(SMALL, name)}" for name in WarmSettings.__dataclass_fields__]
    made = CliRunner().invoke(
        app, ["bench", "warm", "--model", folder, "--device", "cpu", *small, "--json", str(figures)]
    )
    assert made.exit_code == 0, made.output
    report = json.loads(figures.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["alone", *WAYS]
    assert all(row["output_tokens"] == 5 * 4 and row["differing_tokens"] == 0 for row in rows.values())
    assert rows["alone"]["cached_tokens"] == rows["together"]["cached_tokens"] == 0
    assert min(rows["twice"]["cached_tokens"], rows["together-twice"]["cached_tokens"]) > 500
    assert rows["evicted"]["cached_tokens"] <= rows["together-twice"]["cached_tokens"]
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert set(rows["alone"]) | set(report["settings"]) <= documented


def test_tokens_that_differ_are_counted(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(run: WarmRun) -> Answers:
        answers = run.alone()
        answers.tokens[3][1] += 1
        answers.tokens[3][3] += 1
        return answers

    monkeypatch.setitem(warm.WAYS, "twice", damaged)
    maker = EngineMaker.load(folder, {"device": "cpu"})
    alone, twice = compare_answers(maker, SMALL, ways=["twice"])
    assert (alone["differing_tokens"], alone["differing_requests"]) == (0, 0)
    assert (twice["differing_tokens"], twice["differing_requests"]) == (2, 1)

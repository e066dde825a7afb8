"""The bench of the HTTP front end with a stub engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from tests.tiny import write_tiny_checkpoint

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


def test_every_token_of_every_stream_arrives(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    options = ["--workers", "2", "--streams", "12", "--tokens", "40", "--rate", "2000", "--readers", "2"]
    result = CliRunner().invoke(
        app, ["bench", "front-end", *options, "--model", str(folder), "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    (row,) = report["rows"]
    assert row["workers"] == 2
    assert 1 <= row["tokens_per_event"] <= 40
    assert row["tokens_per_s"] * row["seconds"] == pytest.approx(12 * 40)
    section = DOCUMENT.read_text().split("## `bench front-end`")[1].split("\n## ")[0]
    for key in (*row, *report["settings"]):
        assert f"`{key}`" in section


@pytest.mark.parametrize("option", ["--streams", "--tokens", "--rate", "--readers", "--workers"])
def test_bad_numbers_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "front-end", option, "0"])
    assert result.exit_code == 2
    assert option in result.output

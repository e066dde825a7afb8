"""The bench of a fleet's ingress with stub engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


@pytest.mark.parametrize("option", ["--tokens", "--token-ms", "--replicas", "--repeat"])
def test_bad_numbers_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "ingress", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.slow
def test_every_path_delivers_every_token(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
    from tests.cluster.running_fleet import run_with_own_ray
    from tests.tiny import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path / "tiny")
    options = ["--streams", "6", "--tokens", "20", "--repeat", "2", "--model", str(folder)]
    run_with_own_ray("bench", "ingress", *options, "--json", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["path"] for row in report["rows"]] == ["direct", "ingress", "Ray handle"]
    section = DOCUMENT.read_text().split("## `bench ingress`")[1].split("\n## ")[0]
    for row in report["rows"]:
        assert row["tokens_per_event"] >= 1
        for key in (*row, *report["settings"]):
            assert f"`{key}`" in section

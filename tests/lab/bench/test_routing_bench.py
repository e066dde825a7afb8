"""The bench of routers by the size of a fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


@pytest.mark.parametrize("option", ["--replicas", "--prompt-tokens", "--requests"])
def test_bad_numbers_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "routing", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


def test_every_router_is_measured_at_every_size(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--replicas", "1,5", "--requests", "60", "--prompt-tokens", "200", "--quiet", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "routing", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    routers = ("least-loaded", "new-tokens-batch", "prefix-affine", "round-robin")
    assert [(row["router"], row["replicas"]) for row in report["rows"]] == [
        (router, count) for router in routers for count in (1, 5)
    ]
    assert all(row["read_us"] > 0 and row["choose_us"] > 0 for row in report["rows"])
    section = DOCUMENT.read_text().split("## `bench routing`")[1].split("\n## ")[0]
    for key in (*report["rows"][0], *report["settings"]):
        assert f"`{key}`" in section

"""`bench tenants`: a light tenant beside one that floods the server within the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from tests.tiny import write_tiny_checkpoint


def run_flood(result: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["bench", "tenants", "--json", str(result), "-q", *options])
    assert done.exit_code == 0, done.output
    assert "requests of the light tenant were answered" in done.output
    report: dict[str, Any] = json.loads(result.read_text())
    return report


def check(report: dict[str, Any]) -> None:
    alone, flooded, heavy = report["rows"]
    assert alone["answered"] == alone["requests"] > 0
    assert flooded["answered"] == flooded["requests"] > 0  # none is refused
    assert heavy["answered"] > 0
    assert heavy["refused"] > 0
    assert heavy["failed"] == 0


def test_all_requests_of_a_light_tenant_are_accepted(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", positions=512)
    options = ("--model", str(folder), "--kv-memory", "2MiB", "--seconds", "3", "--idle-seconds", "1", "--seed", "1")
    load = ("--interval", "0.3", "--concurrency", "60", "--max-waiting", "24", "--max-batch-requests", "8")
    report = run_flood(tmp_path / "result.json", *options, *load, "--output-len", "100")
    check(report)
    assert report["settings"]["engine"]["order"] == "fair"


@pytest.mark.slow
def test_a_minute_of_flood_on_the_default_model(tmp_path: Path) -> None:
    check(run_flood(tmp_path / "result.json"))

"""The bench of the highest rate at which all classes keep their targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.cli_runner import run
from tests.lab.bench.test_schedulers import write_trace


def test_the_rate_falls_with_stricter_targets(tmp_path: Path) -> None:
    trace, report = write_trace(tmp_path / "trace.jsonl"), tmp_path / "report.json"
    rates = []
    for target in ("ttft:200", "ttft:90"):
        options = ["--class", f"all={target}", "--settings", "order=fcfs", "--settings", "order=slack", "--quiet"]
        outcome = run("bench", "rates", "--trace", str(trace), *options, "--json", str(report))
        assert outcome.exit_code == 0, outcome.output
        rows = json.loads(report.read_text())["rows"]
        assert [row["settings"] for row in rows] == [{"order": "fcfs"}, {"order": "slack"}]
        assert rows[0]["ratio"] == 1.0
        assert rows[1]["ratio"] == pytest.approx(rows[1]["rate"] / rows[0]["rate"])
        rates.append(rows[0]["rate"])
    assert rates[0] > rates[1] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [((), "give recorded traffic"), (("--trace", "x.csv", "--settings", "speed=3"), "must be name=value")],
)
def test_rates_refuse_what_they_cannot_measure(options: tuple[str, ...], problem: str) -> None:
    outcome = run("bench", "rates", *options)
    assert outcome.exit_code == 2
    assert problem in " ".join(outcome.output.split())

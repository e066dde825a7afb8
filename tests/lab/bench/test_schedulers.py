"""The bench that compares schedulers on recorded traffic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift_lab.bench.schedulers import COLUMNS, SCHEDULERS
from tests.api.cli_runner import run
from tests.kernels.tiny_config import CONFIG


def write_trace(path: Path, *, blocks: bool = False) -> Path:
    rows = [
        {"timestamp": 200 * index, "input_length": 300 + 40 * (index % 5), "output_length": 5 + index % 4}
        | ({"hash_ids": [0, index]} if blocks else {})
        for index in range(24)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_schedulers_are_compared_on_each_trace(tmp_path: Path) -> None:
    """A table for each trace, on the page, in the results and in the report; orders by the cache need shared blocks."""
    plain, shared = write_trace(tmp_path / "plain.jsonl"), write_trace(tmp_path / "shared.jsonl", blocks=True)
    page, results, report = (tmp_path / name for name in ("page.md", "results.json", "report.json"))
    outcome = run(
        *("bench", "schedulers", "--trace", str(plain), "--trace", str(shared), "--quiet"),
        *("--page", str(page), "--results", str(results), "--json", str(report)),
    )
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads(report.read_text())["rows"]
    assert [sum(row["trace"] == name for row in rows) for name in ("plain", "shared")] == [
        len(SCHEDULERS) - 2,
        len(SCHEDULERS),
    ]
    for row in rows:
        assert 0 <= row["goodput_requests_per_s"] <= row["requests_per_s"]
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["within_batch"] == 1.0
    text = page.read_text()
    assert text.count("| slack, slack |") == 2
    assert "--trace plain.jsonl" in text
    assert all(column.heading in text for column in COLUMNS)
    sections = json.loads(results.read_text())["sections"]
    assert [section["title"] for section in sections] == ["plain", "shared"]
    assert all(section["machine"] and section["commit"] for section in sections)


@pytest.mark.slow
def test_the_engine_runs_beside_its_simulation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    trace, report = write_trace(tmp_path / "trace.jsonl"), tmp_path / "report.json"
    options = "--load-format dummy --device cpu --max-batch-requests 4 --max-batch-tokens 64 --kv-memory 16MiB --quiet"
    traffic = "--requests 2 --engine-requests 10 --engine-scale 0.4"
    command = ["bench", "schedulers", "--model", str(tmp_path), "--trace", str(trace), *options.split()]
    outcome = run(*command, *traffic.split(), "--json", str(report))
    assert outcome.exit_code == 0, outcome.output
    rows = [row for row in json.loads(report.read_text())["rows"] if ": " in row["name"]]
    assert [row["name"].rpartition(": ")[2] for row in rows] == ["measured", "simulated"] * 3
    assert all(row["ttft_p50_ms"] > 0 for row in rows)


def test_schedulers_need_a_trace() -> None:
    outcome = run("bench", "schedulers")
    assert outcome.exit_code == 2
    assert "give recorded traffic" in outcome.output

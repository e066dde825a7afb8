"""A bench from outside the package is a command of `chairlift bench` like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift_lab.bench.base import BENCHES
from tests.tiny import write_tiny_checkpoint

TOY = Path(__file__).parent / "toys" / "load_time_bench.py"
PAGE = Path(__file__).parents[2] / "docs" / "extending" / "bench.md"
FOLDER = Path(__file__).parents[2] / "src" / "chairlift_lab" / "bench"


def run(*arguments: str, plugins: Path | None = TOY) -> subprocess.CompletedProcess[str]:
    variables = {"CHAIRLIFT_PLUGINS": "" if plugins is None else str(plugins), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "chairlift", "bench", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


def test_every_module_is_a_bench() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "base"}
    assert BENCHES.names() == tuple(sorted(name.replace("_", "-") for name in modules))
    for name in BENCHES.names():
        bench = BENCHES.get(name)
        assert bench.command.__doc__
        assert bench.examples


def test_a_plugin_is_listed_with_the_first_line_of_its_docstring() -> None:
    shown = run("--help").stdout
    assert "load-time" in shown
    assert "Seconds to load a model" in shown
    assert "load-time" not in run("--help", plugins=None).stdout


def test_a_plugin_has_its_own_options_and_those_of_all_benches() -> None:
    shown = run("load-time", "--help").stdout
    assert all(option in shown for option in ("--starts", "--json", "--quiet", "--device"))
    assert "chairlift bench load-time --starts 3" in shown
    assert "--plot" not in shown


def test_a_plugin_measures_prints_and_writes_a_report(tmp_path: Path) -> None:
    model, file = write_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "result.json"
    engine = ["--model", str(model), "--device", "cpu", "--kv-memory", "4MiB"]
    done = run("load-time", *engine, "--starts", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "Load time" in done.stdout
    report = json.loads(file.read_text())
    assert report["bench"] == "load-time"
    assert report["settings"] == {"model": str(model), "starts": 2}
    assert [row["name"] for row in report["rows"]] == ["1", "2"]
    assert f"{report['rows'][0]['first_token_ms']:.1f}" in done.stdout


def test_a_plugin_is_refused_before_it_measures_if_the_report_cannot_be_written() -> None:
    done = run("load-time", "--json", "no/such/folder.json")
    assert done.returncode == 2
    assert "--json: cannot write" in done.stderr


@pytest.mark.parametrize("name", ["nonsense", "base"])
def test_an_unknown_bench_is_an_error(name: str) -> None:
    done = run(name)
    assert done.returncode == 2
    assert f"no such command '{name}'" in done.stderr


def test_the_page_shows_this_bench() -> None:
    assert f"```python\n{TOY.read_text()}```" in PAGE.read_text()

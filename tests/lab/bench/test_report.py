"""Reports: one form, with every key documented."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from chairlift.errors import InvalidParameter
from chairlift_lab.bench.throughput import ThroughputComparison
from chairlift_lab.common.engines import Measurement, add_speedups
from chairlift_lab.report.options import check_writable, machine, machine_line, write_report

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


def test_a_report_has_the_documented_form(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    returned = write_report(file, "throughput", {"model": "m"}, [{"name": "chairlift", "output_tokens_per_s": 1.5}])
    written = json.loads(file.read_text())
    assert written == returned
    assert list(written) == ["bench", "machine", "settings", "rows"]
    assert written["bench"] == "throughput"
    assert written["rows"] == [{"name": "chairlift", "output_tokens_per_s": 1.5}]


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    rows = [Measurement(1.0, input_tokens=1, token_times=[[0.5]]).row("chairlift")]
    add_speedups(rows)
    settings = ThroughputComparison("m").settings()
    assert set(rows[0]) | set(settings) | set(machine()) <= documented


def test_the_machine_is_described() -> None:
    found = machine()
    assert found["cores"] == os.cpu_count()
    assert found["memory_bytes"] > 0
    assert all(found[name] for name in ("cpu", "os", "python", "torch", "transformers", "chairlift"))
    assert found["cpu"] in machine_line(found)
    json.dumps(found)


def test_a_report_never_holds_values_that_are_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_report(tmp_path / "report.json", "throughput", {}, [{"name": "a", "seconds": float("nan")}])


def test_an_unwritable_file_is_refused_beforehand(tmp_path: Path) -> None:
    check_writable(tmp_path / "report.json")
    for place in (tmp_path, tmp_path / "nowhere" / "report.json"):
        with pytest.raises(InvalidParameter, match="json: cannot write"):
            check_writable(place)
        with pytest.raises(InvalidParameter, match="json: cannot write"):
            write_report(place, "throughput", {}, [])

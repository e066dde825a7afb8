"""Files that options of the lab's commands name: what never ends, or is no such file, is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import InvalidParameter
from chairlift_lab.bench.quality import text_to_score
from chairlift_lab.common.model_shapes import read_json_config
from chairlift_lab.common.workload import load_workload
from chairlift_lab.load.trace_files import load_trace
from tests.api.cli_runner import run

READERS: dict[str, Callable[[Path], Any]] = {
    "trace": load_trace,
    "workload": load_workload,
    "text": text_to_score,
    "model": lambda path: read_json_config(path, "model"),
}


@pytest.mark.parametrize("parameter", READERS)
def test_files_that_never_end_are_refused(parameter: str) -> None:
    with pytest.raises(InvalidParameter, match=rf"^{parameter}: '/dev/zero' is larger than \d+ MiB$"):
        READERS[parameter](Path("/dev/zero"))


def test_a_command_refuses_a_config_that_never_ends(tmp_path: Path) -> None:
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    outcome = run("simulate", "--model", str(endless))
    assert outcome.exit_code == 2
    assert "is larger than 16 MiB" in " ".join(outcome.output.split())


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(InvalidParameter, match=r"^model: "):
        read_json_config(tmp_path, "model")

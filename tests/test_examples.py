"""Every example runs, on a tiny random model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_tiny_checkpoint

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example_model")
    write_tiny_checkpoint(folder)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_prints_something(example: Path, tiny_model: Path) -> None:
    variables = {"CHAIRLIFT_EXAMPLE_MODEL": str(tiny_model), "CHAIRLIFT_EXAMPLE_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(example)], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), f"{example.name} printed nothing"


def test_the_index_lists_every_example() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [example.name for example in EXAMPLES if f"[{example.name}]" not in index] == []

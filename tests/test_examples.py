"""Every example runs, on a tiny random model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.own_ray import own_ray
from tests.tiny import write_tiny_checkpoint

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
ON_RAY = FOLDER / "ray_data.py"


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


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one != ON_RAY], ids=lambda path: path.stem)
def test_example_runs_and_prints_something(example: Path, tiny_model: Path) -> None:
    assert run(example, tiny_model, os.environ).strip(), f"{example.name} printed nothing"


def run(example: Path, model: Path, environment: Mapping[str, str]) -> str:
    """Run an example and return what it prints."""
    variables = {"CHAIRLIFT_EXAMPLE_MODEL": str(model), "CHAIRLIFT_EXAMPLE_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(example)], env={**environment, **variables}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_for_ray_data_answers_every_row(tiny_model: Path) -> None:
    for module in ("ray", "pyarrow", "pandas"):
        pytest.importorskip(module, reason="needs Ray Data: pip install 'chairlift[ray-data]'")
    with own_ray() as ray:
        printed = run(ON_RAY, tiny_model, ray.environment)
    assert [line.split(" -> ")[0] for line in printed.splitlines() if " -> " in line] == [
        "'Why is the sky blue?'",
        "'Why does a batch never stop?'",
        "'What is a KV cache?'",
        "'Name a mountain.'",
    ]


def test_the_index_lists_every_example() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [example.name for example in EXAMPLES if f"[{example.name}]" not in index] == []

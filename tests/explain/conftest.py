"""A stage with a tiny model: what is drawn depends on lengths and books, hardly on what is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chairlift.explain.stage import Stage
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("explain") / "tiny")


@pytest.fixture(scope="session")
def stage(tiny_folder: Path) -> Stage:
    return Stage.load(str(tiny_folder))

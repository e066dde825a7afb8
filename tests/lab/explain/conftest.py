"""Engines of a tiny model: the pictures depend on lengths and block tables, hardly on the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift_lab.explain.recording import TopicEngines
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The model is so small that a second thread only waits."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("explain") / "tiny")


@pytest.fixture(scope="session")
def engines(tiny_folder: Path) -> TopicEngines:
    return TopicEngines.load(str(tiny_folder))

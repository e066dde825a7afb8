from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.execution.config import EngineConfig
from chairlift.execution.startup import LoadedModel, load_model
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("speculation") / "tiny")


@pytest.fixture(scope="session")
def tiny(folder: Path) -> LoadedModel:
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)

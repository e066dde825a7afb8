from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.startup import LoadedModel, load_model
from chairlift_lab.commands.train_draft import TrainSettings
from chairlift_lab.training.train_draft import train_draft
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("speculation") / "tiny")


@pytest.fixture(scope="session")
def tiny(folder: Path) -> LoadedModel:
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)


@pytest.fixture(scope="session")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("draft")
    settings = TrainSettings(texts=12, length=32, epochs=2, batch=4, draft_vocab=150, device="cpu", learning_rate=3e-3)
    said: list[str] = []
    train_draft(str(folder), output, settings, [], said.append)
    assert any("step 6 of 6" in line for line in said)
    assert json.loads((output / "config.json").read_text())["taps"], "layers in the middle are read, too"
    return output

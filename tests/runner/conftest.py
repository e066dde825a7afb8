"""Fixtures of the GPU runner's tests, which use Triton's interpreter and no graphs on machines without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.attention.backends.base import choose_backend
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.config import EngineConfig
from chairlift.engine.startup import LoadedModel, load_model
from chairlift.models.base import CausalLM
from tests.kernels.conftest import device
from tests.runner.gpu_engine import random_model
from tests.tiny import write_tiny_checkpoint

__all__ = ["device"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Reduce the number of programs, which the interpreter runs sequentially."""
    if device.type == "cpu":
        monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)
        monkeypatch.setattr("chairlift.kernels.triton.latent.absorbed.PROGRAMS", 4)


@pytest.fixture(scope="session")
def model(device: torch.device) -> CausalLM:
    return random_model(device)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("runner") / "tiny")


@pytest.fixture(scope="session")
def tiny(folder: Path, device: torch.device) -> LoadedModel:
    return load_model(str(folder), EngineConfig(device=device.type, dtype="float32"), progress=False)


@pytest.fixture
def paged_backend(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """`attention="auto"` means the GPU's backend on a CPU too."""
    if device.type == "cpu":  # contexts are not split: the interpreter is sequential
        monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 1)

    def choose(name: str, *rest: Any, **more: Any) -> Any:
        return PagedGPUAttention(more.get("invariant_for")) if name == "auto" else choose_backend(name, *rest, **more)

    monkeypatch.setattr("chairlift.engine.settings.choose_backend", choose)

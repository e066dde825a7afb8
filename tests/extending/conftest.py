"""Toys also run on the GPU runner: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.tiny import write_tiny_checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when it is first imported


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")

"""Settings for all tests of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vision.families import Reference, write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Use one thread: for models this small a second one only adds waiting."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """Makes the checkpoint of a family and transformers with it, once."""
    made: dict[str, tuple[Path, Reference]] = {}

    def make(model_type: str) -> tuple[Path, Reference]:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("vision") / model_type
            made[model_type] = folder, Reference.of(write_checkpoint(model_type, folder), folder)
        return made[model_type]

    return make

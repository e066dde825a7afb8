"""Beam search of the default model with many prompts; test_default_model.py has the fast test of one."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.engine.startup import LoadedModel
from tests.api.beam_reference import check_beams
from tests.prompts import SHORT

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Batches are too small for more threads."""


@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_of_twenty_prompts_equal_transformers(width: int, default_model: LoadedModel, hf_default: Any) -> None:
    assert len(SHORT) >= 20
    check_beams(default_model, hf_default, SHORT, width, new=6)

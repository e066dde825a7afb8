"""Settings for all tests of beam search."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Use one thread: for models this small a second one only adds waiting."""

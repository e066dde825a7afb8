"""Settings for all tests of beam search."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The models here are so small that a second thread only waits, for very long on a busy machine."""

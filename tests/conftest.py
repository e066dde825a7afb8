"""Settings and fixtures for all tests."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings

    from tests.repeatable import PROFILE, ignore_loaded_modules
except ImportError:  # tests/gpu and tests/kernels run without it
    settings = None

SLOW_TEST_TIMEOUT = 1800  # seconds; `timeout` in pyproject.toml applies to all other tests

# A shell ignores SIGINT in background jobs and their children inherit that; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread per worker: there are as many workers as cores. Must be set before torch and numba are imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when any test module first imports it


# `make test` uses the same examples every time, so that it never fails by chance; `make test-all` searches for more.
if settings is not None:
    # No limits on time either: a busy machine must not fail a test.
    settings.register_profile(
        "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("searching", derandomize=False)
    settings.load_profile(PROFILE)
    if PROFILE == "repeatable":
        ignore_loaded_modules()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, since workers take whole files, and give slow tests a longer timeout."""
    items.sort(key=lambda item: "model" not in item.keywords)
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.timeout(SLOW_TEST_TIMEOUT))


def pytest_collection_finish() -> None:
    """Speed up Triton's interpreter where a test module has imported it."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import speed_up

        speed_up()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Commands that run in this process set it for their own output."""
    log = logging.getLogger("chairlift")
    log.setLevel(logging.NOTSET)
    yield
    log.setLevel(logging.NOTSET)

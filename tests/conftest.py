"""What all tests have in common."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

try:
    from hypothesis import settings
except ImportError:  # tests/gpu and tests/kernels run without it
    settings = None

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # There are as many workers as cores. Set here, before torch and numba are imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


# `make test` tries the same examples every time, so that it fails for a change and never by chance; `make test-all`
# looks for new ones.
if settings is not None:
    settings.register_profile("repeatable", derandomize=True)
    settings.register_profile("searching", derandomize=False)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest goes first: workers take whole files, and at the end one would wait for the other."""
    items.sort(key=lambda item: "model" not in item.keywords)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

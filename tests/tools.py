"""External programs that some tests need."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require_tool(*names: str) -> str:
    """Return the path of the first of these programs that is installed; skip the test if none is.

    With CHAIRLIFT_REQUIRE_TOOLS=1 the test fails instead, so that a complete run cannot skip it.
    """
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        missing(f"needs {' or '.join(names)}")
    return found[0]


def missing(reason: str) -> NoReturn:
    """Skip the test for this reason, or fail it with CHAIRLIFT_REQUIRE_TOOLS=1."""
    if os.environ.get("CHAIRLIFT_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{reason} (CHAIRLIFT_REQUIRE_TOOLS is set)")
    pytest.skip(reason)

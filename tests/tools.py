"""External programs that some tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "network")


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


def npm_folder(name: str, command: Sequence[str], files: Sequence[Path] = ()) -> Path:
    """Return a folder outside the tree where `npm COMMAND` has installed packages, which it does once. `files` are the
    package's description, if there is one."""
    require_tool("node")
    npm = require_tool("npm")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "chairlift-tests"
    folder = cache / name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            for file in files:
                shutil.copy(file, fresh)
            install = [npm, *command, "--no-audit", "--no-fund", "--ignore-scripts"]
            done = subprocess.run(install, cwd=fresh, capture_output=True, text=True, timeout=300)
            if done.returncode and any(sign in done.stderr for sign in NO_NETWORK):
                missing("the packages cannot be fetched: no network")
            assert done.returncode == 0, done.stderr[-2000:]
            if not folder.exists():  # another run may have created it
                os.rename(fresh, folder)
                Path(fresh).mkdir()
    return folder

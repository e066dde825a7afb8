"""Hostile model files are refused without a crash, a hang or much memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_hostile_files_are_refused_within_a_limit_on_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.loading.hostile_files", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) files", done.stderr)[-1]) >= 150

"""The launcher of a clone finds the command that `make install` has made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import chairlift

ROOT = Path(__file__).parents[2]


def run(launcher: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(launcher), "--version"], capture_output=True, text=True, cwd="/", timeout=60)


def test_the_launcher_says_what_is_missing(tmp_path: Path) -> None:
    done = run(Path(shutil.copy(ROOT / "chairlift", tmp_path)))
    assert (done.returncode, done.stdout) == (1, "")
    assert "run 'make install' there" in done.stderr
    assert str(tmp_path) in done.stderr


def test_the_launcher_runs_the_command_from_any_folder(tmp_path: Path) -> None:
    launcher = Path(shutil.copy(ROOT / "chairlift", tmp_path))
    command = tmp_path / ".venv" / "bin" / "chairlift"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m chairlift "$@"\n')
    command.chmod(0o755)
    (tmp_path / "linked").symlink_to(launcher)
    for path in (launcher, tmp_path / "linked"):
        assert run(path).stdout == f"chairlift {chairlift.__version__}\n"

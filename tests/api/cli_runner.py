"""Running the command line in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from chairlift.cli.main import app

FAST = ["--device", "cpu", "--kv-memory", "4MiB"]


def run(*arguments: str, stdin: str = "", **variables: str) -> Any:
    return CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "200", **variables})


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own, with one thread: tests share the machine."""
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    program = "from chairlift.cli.main import main; main()"
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=os.environ | threads, **options)

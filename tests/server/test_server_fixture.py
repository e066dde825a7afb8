"""Servers that a test starts end with it, even if they do not start or stop properly."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.server import running_server
from tests.server.running_server import RunningServer, start_server, wait_for


def test_a_server_that_does_not_start_in_time_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def listen(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "600"]))
        return started[-1]

    monkeypatch.setattr(running_server.subprocess, "Popen", listen)
    monkeypatch.setattr(running_server, "START_SECONDS", 0.1)
    with pytest.raises(AssertionError, match="the server to start"):
        start_server(tmp_path, tmp_path / "log")
    assert started[0].returncode == -signal.SIGTERM


def test_a_server_that_does_not_stop_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_server, "STOP_SECONDS", 0.1)
    ignores_sigterm = "trap '' TERM; sleep 600 & echo $!; wait"
    process = subprocess.Popen(["sh", "-c", ignores_sigterm], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    with pytest.raises(subprocess.TimeoutExpired):
        RunningServer(process, "", tmp_path).stop()
    assert process.returncode in (-signal.SIGKILL, 0)  # 0: its child was killed first, and it had nothing to wait for
    wait_for(lambda: not is_alive(child), "its child to exit")


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False

"""An engine process that is started before its settings are known."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift.__main__ import _engine_process_ahead
from chairlift.server.process import this_process
from chairlift.server.process.engine_client import EngineClient, EngineState, Supervision
from chairlift.server.process.this_process import ENGINE_MODULE, FROM_INPUT, engine_process_ahead

SUPERVISION = Supervision(max_restarts=2, first_backoff=0.01)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake engine writes a line when it has its settings; it is run instead of the engine."""
    script = tmp_path / "engine"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent / "fake_engine.py"}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def early_process() -> subprocess.Popen[bytes]:
    return this_process._waiting[0].process


def make_client(notes: Path, fault: str = "none") -> EngineClient:
    return EngineClient(f"{fault}@{notes}", {}, lambda report: None, lambda: None, SUPERVISION)


async def settled(client: EngineClient) -> EngineState:
    return await asyncio.wait_for(client.wait_until_settled(), 120)


def test_the_engine_takes_it_once_and_a_restart_starts_another(notes: Path) -> None:
    async def check(early: subprocess.Popen[bytes]) -> None:
        client = make_client(notes)
        await client.start()
        assert await settled(client) is EngineState.READY
        assert client._handle.process.pid == early.pid
        os.kill(early.pid, 9)
        while client.state is EngineState.READY:
            await asyncio.sleep(0.01)
        assert await settled(client) is EngineState.READY
        assert client._handle.process.pid != early.pid
        assert client.restarts == 1
        await client.stop(timeout=0.0)

    with engine_process_ahead():
        asyncio.run(check(early_process()))
    assert notes.read_text() == "born\n" * 2


def test_a_stopped_client_leaves_no_process(notes: Path) -> None:
    async def check() -> None:
        client = make_client(notes)
        await client.start()
        await settled(client)
        await client.stop(timeout=0.0)

    with engine_process_ahead():
        early = early_process()
        asyncio.run(check())
        assert early.wait(60) == -9


def test_its_exit_while_loading_is_reported(notes: Path) -> None:
    async def check() -> None:
        client = make_client(notes, "exits")
        await client.start()
        assert await settled(client) is EngineState.FAILED
        assert "exited with status 3" in client.problem
        await client.stop()

    with engine_process_ahead():
        asyncio.run(check())
    assert notes.read_text() == "born\n"


def test_one_that_died_before_is_not_used(notes: Path) -> None:
    async def check() -> None:
        client = make_client(notes)
        await client.start()
        assert await settled(client) is EngineState.READY
        await client.stop(timeout=0.0)

    with engine_process_ahead():
        early_process().kill()
        early_process().wait(60)
        asyncio.run(check())
    assert notes.read_text() == "born\n"


def test_a_command_that_fails_before_the_engine_ends_it(notes: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with engine_process_ahead():
            started.append(early_process())
            raise ValueError("an option")

    with pytest.raises(ValueError, match="an option"):
        fail()
    assert started[0].returncode == -9
    assert not this_process._waiting
    assert notes.read_text() == ""


def test_sigterm_before_the_engine_ends_it(notes: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        with engine_process_ahead():
            started.append(early_process())
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        wait()
    assert ended.value.code == 0
    assert started[0].returncode == -9
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_settings_the_process_ends() -> None:
    command = [sys.executable, "-m", ENGINE_MODULE, FROM_INPUT, str(os.getpid())]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [(["serve", "model"], True), (["serve", "--help"], False), (["models"], False), ([], False)],
)
def test_only_a_server_starts_it(notes: Path, arguments: list[str], starts: bool) -> None:
    with _engine_process_ahead(arguments):
        assert bool(this_process._waiting) == starts

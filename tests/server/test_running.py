"""`chairlift ps` and `chairlift stop`: what they find, what they wait for, and what they never touch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.cli.servers import _age
from chairlift.server.lifecycle import _Signals
from chairlift.server.process.running import RunningServer, ServerStatus, poll, request_stop, running_servers
from tests.api.cli_runner import run
from tests.server.running_server import NAME, start_server, wait_for

# A process that answers as a server does. After the request to stop, some polls see open requests; then it exits.
FAKE = """
import asyncio, sys, time
from chairlift.server.process.running import ServerStatus, announced

async def main(model, port, polls):
    stopping, left = asyncio.Event(), [int(polls)]
    def stop(now):
        stopping.set()
        if now:
            left[0] = 0
    def status():
        left[0] -= stopping.is_set()
        state = "draining" if stopping.is_set() else "ready"
        return ServerStatus(model=model, names=(model, "org/" + model), address=f"http://127.0.0.1:{port}",
            started=time.time() - 90, state=state, running=2, waiting=1, open=max(0, left[0]), drain_seconds=30.0)
    async with announced(status, stop):
        print("up", flush=True)
        while left[0] > 0:
            await asyncio.sleep(0.02)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sockets of its own, with a path that is short enough for them; no other servers are found."""
    with tempfile.TemporaryDirectory(prefix="lift") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path) / "chairlift"


@pytest.fixture
def fakes() -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(model: str, port: int, polls: int = 3) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", FAKE, model, str(port), str(polls)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "up\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_real_server_is_listed_and_stopped(tiny_folder: Path, tmp_path: Path, folder: Path) -> None:
    server = start_server(tiny_folder, tmp_path / "log")
    try:
        server.wait_until("/health", 200)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (found,) = running_servers()
        assert (found.pid, found.status.address, found.status.model) == (server.process.pid, server.url, NAME)
        assert found.status.state == "ready"
        assert found.memory > 50e6
        shown = next(one for one in json.loads(run("ps", "--json").stdout)["servers"] if one["pid"] == found.pid)
        assert (shown["model"], shown["address"], shown["running"], shown["waiting"]) == (NAME, server.url, 0, 0)
        result = run("stop", server.url)
        assert result.exit_code == 0, result.output
        assert f"{NAME} at {server.url} (process {found.pid}) is stopped." in result.stderr
        assert server.process.wait(10) == 0
    finally:
        server.stop()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "target", ["alpha", "org/alpha", "http://127.0.0.1:18001", "127.0.0.1:18001", "localhost:18001", ":18001", "{pid}"]
)
def test_a_server_is_meant_by_its_names_its_address_and_its_process(fakes: Any, target: str) -> None:
    alpha, beta = fakes("alpha", 18001), fakes("beta", 18002)
    result = run("stop", target.format(pid=alpha.pid))
    assert result.exit_code == 0, result.output
    assert alpha.wait(5) == 0
    assert beta.poll() is None
    assert [server.pid for server in running_servers()] == [beta.pid]


@pytest.mark.parametrize(
    ("host", "targets"),
    [
        ("0.0.0.0", ("0.0.0.0:80", "localhost:80", "127.0.0.1:80", "http://127.0.0.1:80/", ":80")),
        ("[::]", ("[::]:80", "localhost:80", "http://[::1]:80", ":80")),
        ("10.0.0.1", ("10.0.0.1:80", ":80")),
    ],
)
def test_a_server_is_meant_by_the_addresses_that_reach_it(host: str, targets: tuple[str, ...]) -> None:
    status = ServerStatus(model="m", names=("m",), address=f"http://{host}:80", started=0.0, state="ready")
    server = RunningServer(socket="", pid=7, status=status)
    assert all(server.is_meant(target) for target in targets)
    assert not any(server.is_meant(target) for target in ("localhost:8080", "127.0.0.2:80", "80", "http"))
    assert server.is_meant("localhost:80") is (host != "10.0.0.1")


def test_a_port_without_its_colon_is_proposed_with_it(fakes: Any) -> None:
    fakes("alpha", 18001)
    assert "no server of yours is '18001'; did you mean :18001?" in run("stop", "18001").stderr
    assert "no server of yours is '18002'; there are alpha" in run("stop", "18002").stderr


def test_stop_says_what_it_waits_for(fakes: Any) -> None:
    fakes("alpha", 18001)
    lines = run("stop", "alpha").stderr.splitlines()
    title = "alpha at http://127.0.0.1:18001"
    assert lines[0].startswith(f"Stopping {title}")
    assert lines[0].endswith("waiting for 2 requests, at most 30 s.")
    assert lines[1].endswith("waiting for 1 request, at most 30 s.")
    assert lines[-1].endswith("is stopped.")


def test_only_now_cuts_requests_off(fakes: Any) -> None:
    """A second request to stop waits as the first one does."""
    server = fakes("alpha", 18001, polls=1000)
    (found,) = running_servers()
    for _ in range(2):
        status = request_stop(found, now=False)
        assert status is not None
        assert (status.state, status.open > 900) == ("draining", True)
    result = run("stop", "alpha", "--now")
    assert result.exit_code == 0, result.output
    assert "waiting" not in result.stderr
    assert server.wait(5) == 0


def test_a_request_to_stop_is_no_second_signal() -> None:
    async def stopped() -> list[tuple[bool, int]]:
        signals, found = _Signals(), []
        for now in (False, False, True):
            signals.stop(now)
            found.append((signals.first.is_set(), signals.second))
        return found

    assert asyncio.run(stopped()) == [(True, 0), (True, 0), (True, signal.SIGTERM)]


def test_a_server_that_hangs_is_not_said_to_be_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "1.sock"))
        listener.listen(0)
        with contextlib.ExitStack() as waiting:
            monkeypatch.setattr("chairlift.server.process.running.ANSWER_SECONDS", 0.01)
            server = RunningServer(socket=str(folder / "1.sock"), pid=1, status=None)
            for _ in range(4):  # They fill the queue of connections that are not accepted.
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                with contextlib.suppress(OSError):
                    client.connect(server.socket)
            assert poll(server) == (True, None)
            assert [(each.pid, each.status) for each in running_servers()] == [(1, None)]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-1, "0 s"), (59.9, "59 s"), (90, "1 min"), (7199, "1 h"), (200_000, "2 d")]
)
def test_an_age_is_that_of_whole_units(seconds: float, shown: str) -> None:
    assert _age(seconds) == shown


def test_a_table_shows_all(fakes: Any) -> None:
    fakes("alpha", 18001), fakes("beta", 18002)
    rows = [line.split() for line in run("ps").stdout.splitlines() if "1800" in line]
    assert [row[:2] for row in rows] == [["alpha", "http://127.0.0.1:18001"], ["beta", "http://127.0.0.1:18002"]]
    assert rows[0][3] == "ready"
    assert rows[0][-2:] == ["2", "1"]


def test_a_target_that_is_not_clear_is_refused(fakes: Any) -> None:
    one, two = fakes("alpha", 18001), fakes("alpha", 18002)
    unclear = run("stop", "alpha")
    assert unclear.exit_code == 2
    assert "2 servers match: alpha at http://127.0.0.1:18001" in unclear.stderr
    unknown = run("stop", "gamma")
    assert unknown.exit_code == 2
    assert "no server of yours is 'gamma'; there are alpha at" in unknown.stderr
    assert "--all means all" in run("stop", "alpha", "--all").stderr
    assert (one.poll(), two.poll()) == (None, None)


def test_all_are_stopped_or_the_only_one(fakes: Any) -> None:
    fakes("alpha", 18001)
    assert run("stop").exit_code == 0
    assert running_servers() == []
    assert "no server of yours runs" in run("stop").stderr
    fakes("alpha", 18001), fakes("beta", 18002)
    assert "2 servers match" in run("stop").stderr
    assert run("stop", "--all").exit_code == 0
    assert running_servers() == []
    assert run("stop", "--all").exit_code == 0


def test_a_foreign_process_with_the_number_of_a_dead_server_is_never_stopped(fakes: Any, folder: Path) -> None:
    """As after a kill -9, when another process has the number by now."""
    dead = fakes("alpha", 18001)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (left,) = folder.iterdir()
        left.rename(folder / f"{foreign.pid}.sock")
        assert run("stop", str(foreign.pid)).exit_code == 2
        assert running_servers() == []
        assert list(folder.iterdir()) == []  # The socket of the dead is removed.
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_a_server_that_does_not_answer_is_listed_as_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.process.running.ANSWER_SECONDS", 0.1)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "1.sock"))
        listener.listen()
        (found,) = running_servers()
    assert (found.pid, found.status) == (os.getpid(), None)  # The kernel says whose it is, not the name.


def test_other_files_are_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "7.sock").write_text("not a socket")
    assert running_servers() == []
    assert (folder / "7.sock").exists()


def test_a_folder_that_others_can_write_is_not_used(fakes: Any, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    fake = fakes("alpha", 18001)
    wait_for(lambda: any(server.pid == fake.pid for server in running_servers()), "the server elsewhere")
    assert list(folder.iterdir()) == []

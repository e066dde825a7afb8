"""A fleet on a Ray cluster of its own, in separate processes and on a real socket."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.running_server import NAME, RunningServer, wait_for

START_SECONDS, STOP_SECONDS = 300.0, 180.0  # generous: CI machines are slow at times


@dataclass
class RunningFleet(RunningServer):
    home: Path
    arguments: list[str]  # of `cluster serve`

    def address(self) -> str:
        found = re.search(r" at (https?://[\d.]+:\d+) by ", self.log.read_text(errors="replace"))
        return found[1] if found else ""

    def replicas(self) -> list[dict[str, Any]]:
        return list(self.get("/cluster/replicas").json()["replicas"])

    def wait_for_replicas(self, count: int) -> None:
        def ready() -> bool:
            return [one["state"] for one in self.replicas()] == ["ready"] * count

        wait_for(ready, f"{count} ready replicas\n{self.tail()}")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `chairlift cluster` beside this fleet."""
        command = [sys.executable, "-m", "chairlift", "cluster", *arguments]
        return subprocess.run(command, env=_environment(self.home), capture_output=True, text=True, timeout=180)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the fleet and its Ray cluster; whatever does not end is killed, but no other Ray cluster is touched."""
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            for pid in processes_of(self.home):
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            shutil.rmtree(self.home, ignore_errors=True)


def _environment(home: Path) -> dict[str, str]:
    # Ray keeps its token in the home folder, and its sessions in RAY_TMPDIR, where it also looks for running clusters.
    own = {"HOME": str(home), "RAY_TMPDIR": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    caches = {"XDG_CACHE_HOME": kept.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    return kept | caches | threads | own


def processes_of(home: Path) -> list[int]:
    """The processes whose home folder this is."""
    mark, found = f"HOME={home}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def run_with_own_ray(*arguments: str) -> str:
    """Run a command of `chairlift` that starts a Ray cluster of its own, and return its output."""
    home = Path(tempfile.mkdtemp(prefix="cl-"))
    try:
        command = [sys.executable, "-m", "chairlift", *arguments]
        done = subprocess.run(command, env=_environment(home), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout
    finally:
        for pid in processes_of(home):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def start_fleet(folder: Path, log: Path, *options: str, replicas: int = 2) -> RunningFleet:
    home = Path(tempfile.mkdtemp(prefix="cl-"))  # short: Ray's sockets are below it
    with socket.create_server(("127.0.0.1", 0)) as probe:  # the ingress must find the same one after a restart
        port = str(probe.getsockname()[1])
    size = ["--port", port, "--replicas", str(replicas), "--replica-cpus", "0", "--kv-memory", "2MiB"]
    arguments = [str(folder), "--served-model-name", NAME, *size, "--quiet", *options]
    command = [sys.executable, "-m", "chairlift", "cluster", "serve", *arguments, "--address", "local"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(home))
    fleet = RunningFleet(process, "", log, home, arguments)
    try:
        wait_for(lambda: process.poll() is not None or fleet.address(), f"the fleet\n{fleet.tail()}", START_SECONDS)
        assert process.poll() is None, fleet.tail()
    except BaseException:
        fleet.stop()
        print(fleet.tail())
        raise
    fleet.url = fleet.address()
    return fleet

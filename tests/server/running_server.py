"""A server in separate processes, on a real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

NAME = "tiny"
# Only to detect hangs: a busy machine may take most of it.
START_SECONDS, STOP_SECONDS, WAIT_SECONDS = 180.0, 120.0, 180.0
# Shared, because each new client reads the certificates. It keeps no connections, so that tests can count them.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)  # type: ignore[arg-type]

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.url + path)

    def post(self, path: str, body: object) -> httpx.Response:
        # ASCII with escapes, so that lone surrogates can be sent.
        headers = {"Content-Type": "application/json"}
        return HTTP.post(self.url + path, content=json.dumps(body), headers=headers)

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def metric_of(self, name: str, **labels: str) -> float:
        """Return the value with exactly these labels."""
        key = name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
        lines = [line.rsplit(" ", 1) for line in self.get("/metrics").text.splitlines()]
        return sum(float(value) for found, value in lines if found == key)

    def address(self) -> str:
        """Return the address in the server's log; empty until it listens."""
        found = re.search(r"^Serving .* at (https?://[\d.]+:\d+|unix:\S+)$", self.log.read_text(), re.MULTILINE)
        return found[1] if found else ""

    def engine_pid(self) -> int:
        return self._children()[0]

    def _children(self) -> list[int]:
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]

    def wait_until(self, path: str, status: int) -> None:
        wait_for(lambda: _status(self.url + path) == status, f"{path} to answer {status}\n{self.tail()}")

    def wait_idle(self) -> None:
        """Wait until all blocks are free."""
        wait_for(lambda: self.metric("chairlift_kv_blocks_used") == 0, "the KV blocks to be freed")

    def tail(self) -> str:
        return self.log.read_text()[-2000:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server and return its exit status; if it does not exit, kill it and its engine."""
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (*self._children(), self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise


def wait_for(condition: object, what: str, seconds: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def _status(url: str) -> int | None:
    try:
        return HTTP.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None


def start_server(folder: Path, log: Path, *options: str, **environment: str) -> RunningServer:
    name = () if "--served-model-name" in options else ("--served-model-name", NAME)
    command = [sys.executable, "-m", "chairlift", "serve", str(folder), *name, "--port", "0"]
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # the model is too small for more
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--kv-memory", "2MiB", *options], stdout=out, stderr=out, env=os.environ | threads | environment
        )
    server = RunningServer(process, "", log)
    try:
        wait_for(lambda: process.poll() is not None or server.address(), "the server to start", START_SECONDS)
    except BaseException:  # also Ctrl-C: no fixture would stop it yet
        server.stop()
        print(server.tail())
        raise
    assert process.poll() is None, server.tail()
    server.url = server.address()
    return server

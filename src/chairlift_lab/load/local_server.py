"""Our engine for the time of a measurement: as a server on a free port, as a fleet, or alone without a server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from chairlift.config import EngineConfig
from chairlift.errors import EngineDead
from chairlift.options import options_of
from chairlift_lab.common.timing import children, cpu_seconds
from chairlift_lab.common.workload import Workload, text_like_ids
from chairlift_lab.load.client import ClosedLoop, LoadLoop, LoadProgress, LoadRecord, LoadRun, OpenLoop
from chairlift_lab.peers.peers import run_ours

if TYPE_CHECKING:
    from chairlift.cluster.options import ClusterOptions
    from chairlift.server.config import ServerConfig

START_SECONDS = 600
STOP_SECONDS = 30
READY_POLL_SECONDS = 0.02
MODEL_NAME = "bench"


@dataclass(frozen=True, slots=True)
class LocalServer:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds of the front end and of the engine so far; empty without /proc."""
        by_role = {"front_end": cpu_seconds(self.process.pid)}
        for child in children(self.process.pid):
            by_role["engine"] = cpu_seconds(child)
        return {name: seconds for name, seconds in by_role.items() if seconds is not None}


@contextmanager
def local_server(
    model: str, options: Mapping[str, Any], *, max_waiting: int, environment: Mapping[str, str] | None = None
) -> Iterator[LocalServer]:
    """Start a server, wait until it is ready, and stop it at the end; `options` are fields of `EngineConfig`.

    `environment`: variables beside those of this process.
    """
    port = free_port()
    command = [sys.executable, "-m", "chairlift", "serve", model, "--served-model-name", MODEL_NAME, "--quiet"]
    command += ["--port", str(port), "--max-waiting", str(max_waiting), *engine_arguments(options)]
    with tempfile.TemporaryFile() as log, _exit_on_sigterm():
        variables = {name: value for name, value in os.environ.items() if name != "CHAIRLIFT_API_KEY"}
        variables |= environment or {}
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            server = LocalServer(process, port)
            _wait_until_ready(server, log)
            yield server
        finally:
            _stop(process)


@contextmanager
def local_fleet(
    name: str, config: ServerConfig, options: ClusterOptions
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Start a fleet on Ray and stop it at the end; yields its address, and a function that returns its state."""
    from chairlift.cluster.serving.fleet import fleet_status, start_fleet, stop_fleet

    url = start_fleet(name, config, options)
    try:
        yield url, lambda: fleet_status(name)
    finally:
        stop_fleet(name)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Have SIGTERM raise SystemExit, so that a terminated measurement stops its server."""
    if threading.current_thread() is not threading.main_thread():  # other threads cannot set handlers
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_offline(
    model: str, options: Mapping[str, Any], workload: Workload, loop: LoadLoop, warm_up: int, advance: LoadProgress
) -> LoadRun:
    """A load on the engine without a server, in a process of its own; `advance` is called with its progress."""
    requests = workload.requests
    times = list(islice(loop.times(), len(requests))) if isinstance(loop, OpenLoop) else None
    job = {
        "model": model,
        "options": dict(options),
        "requests": [asdict(request) for request in requests],
        "warm_up": [asdict(request) for request in workload.warm_up(warm_up).requests],
        "in_flight": loop.concurrency if isinstance(loop, ClosedLoop) else len(requests),
        "times": times,
    }

    def progress(line: dict[str, Any]) -> None:
        if "finished" in line:
            advance(line["finished"], line["open"], line["tokens"])

    answer = run_ours(job, progress, "the offline engine")
    each = zip(times or answer["arrivals"], answer["arrivals"], answer["token_times"], strict=True)
    records = [
        LoadRecord(due, sent, tokens, tokens[-1], len(request.prompt_ids), len(tokens), cached)
        for request, cached, (due, sent, tokens) in zip(requests, answer["cached_tokens"], each, strict=True)
    ]
    return LoadRun(max(record.end for record in records), records, answer["cpu_seconds"])


def local_model_facts(model: str, options: Mapping[str, Any], *, progress: bool) -> tuple[list[int], int]:
    """The token ids that prompts for a model can be made of, and the most tokens a request to it can have."""
    from chairlift.loading.checkpoint import open_checkpoint
    from chairlift.loading.resolve import resolve_model
    from chairlift.loading.tokenizer import load_tokenizer
    from chairlift.models import describe

    checkpoint = open_checkpoint(resolve_model(model, progress=progress))
    limit = options.get("max_model_len") or describe(checkpoint.config).max_len
    return text_like_ids(load_tokenizer(checkpoint).tokenizer), limit


def engine_arguments(options: Mapping[str, Any]) -> list[str]:
    """Fields of `EngineConfig` as command-line options."""
    flags = {option.name: option.long_flag for option in options_of(EngineConfig)}
    arguments = []
    for name, value in options.items():
        flag = flags[name]
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            arguments += [part for one in value for part in (flag, str(one))]
        elif value is not None:
            arguments += [flag, str(value)]
    return arguments


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: LocalServer, log: IO[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while not _is_ready(server.port):
        if server.process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise EngineDead(f"the server did not start: {lines[-1] if lines else 'without any output'}")
        if time.monotonic() > end:
            raise EngineDead(f"the server was not ready after {START_SECONDS} s")
        time.sleep(READY_POLL_SECONDS)


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

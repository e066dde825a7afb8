"""Clients that vanish, engines that die, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import NAME, RunningServer, start_server, wait_for

ENDLESS = {"model": NAME, "prompt": "a chairlift never stops", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def own_server(tiny_folder: Path, tmp_path: Path) -> RunningServer:
    server = start_server(tiny_folder, tmp_path / "log", "--drain-timeout", "60")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_clients_that_vanish_are_aborted(own_server: RunningServer) -> None:
    own_server.post("/v1/completions", {**ENDLESS, "max_tokens": 4})
    before = open_files(own_server.process.pid)
    chance = random.Random(0)

    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {**ENDLESS, "prompt": f"client {index}", "n": 1 + index % 3, "stream": index % 2 == 0}
        try:
            async with asyncio.timeout(chance.uniform(0.005, 0.4)):
                async with client.stream("POST", own_server.url + "/v1/completions", json=body) as response:
                    async for _ in response.aiter_raw():
                        pass
        except (TimeoutError, httpx.TransportError):
            pass

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            for _ in range(5):
                await asyncio.gather(*(one(client, index) for index in range(60)))

    asyncio.run(crowd())
    own_server.wait_idle()
    assert own_server.post("/v1/completions", {**ENDLESS, "max_tokens": 4}).status_code == 200
    wait_for(lambda: open_files(own_server.process.pid) <= before + 2, 20, "the sockets to be closed")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_engine_ends_its_requests_and_is_started_again(own_server: RunningServer, how: signal.Signals) -> None:
    answers: list[str] = []

    def stream() -> None:
        with httpx.stream(
            "POST", own_server.url + "/v1/completions", json={**ENDLESS, "stream": True}, timeout=60
        ) as r:
            answers.append("".join(r.iter_text()))

    def whole() -> None:
        answers.append(own_server.post("/v1/completions", {**ENDLESS, "n": 8}).text)

    engine = own_server.engine_pid()
    os.kill(engine, signal.SIGSTOP)  # so that nothing can finish first
    threads = [threading.Thread(target=target) for target in (stream, whole)]
    for thread in threads:
        thread.start()
    wait_for(lambda: own_server.get("/version").status_code == 200, 10, "the front end")
    if how is signal.SIGKILL:
        os.kill(engine, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a client hangs on a dead engine"
    assert len(answers) == 2
    assert all("service_unavailable" in answer for answer in answers), answers
    own_server.wait_until("/health", 200)
    assert own_server.engine_pid() != engine
    assert own_server.post("/v1/completions", {**ENDLESS, "max_tokens": 4}).status_code == 200


def test_sigterm_drains(own_server: RunningServer) -> None:
    results: list[httpx.Response] = []
    body = {**ENDLESS, "max_tokens": 150}
    engine = own_server.engine_pid()
    os.kill(engine, signal.SIGSTOP)  # so that none is finished too early
    threads = [
        threading.Thread(target=lambda: results.append(own_server.post("/v1/completions", body))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: own_server.metric("chairlift_requests_open") == 8, 8, "the requests to be taken in")
    own_server.process.send_signal(signal.SIGTERM)
    own_server.wait_until("/ready", 503)
    assert own_server.post("/v1/completions", body).status_code == 503
    os.kill(engine, signal.SIGCONT)
    assert own_server.process.wait(60) == 0, own_server.tail()
    for thread in threads:
        thread.join(10)
    assert [r.json()["usage"]["completion_tokens"] for r in results] == [150] * 8
    wait_for(lambda: not Path(f"/proc/{engine}").exists(), 10, "the engine process to be gone")


def test_a_full_queue_says_when_to_come_back(tiny_folder: Path, tmp_path: Path) -> None:
    server = start_server(tiny_folder, tmp_path / "log", "--max-batch-requests", "1", "--max-waiting", "1")
    try:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        threads = [threading.Thread(target=server.post, args=("/v1/completions", ENDLESS)) for _ in range(2)]
        for thread in threads:
            thread.start()
        # Only then, or the request that is to be refused could take the place of one of the others.
        wait_for(lambda: server.metric("chairlift_requests_open") == 2, 8, "both requests to be taken in")
        refused = server.post("/v1/completions", ENDLESS)
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        os.kill(server.engine_pid(), signal.SIGCONT)
        for thread in threads:
            thread.join(60)
    finally:
        server.process.kill()
        server.process.wait()


def test_api_keys(tiny_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("second\n")
    log = tmp_path / "log"
    options = ("--api-key", "first", "--api-key-file", str(keys))
    server = start_server(tiny_folder, log, *options, ready_path="/health")
    try:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "first"}, 401),
            ({"Authorization": "Basic first"}, 401),
            ({"Authorization": "Bearer first"}, 200),
            ({"Authorization": "bearer second"}, 200),
        ):
            for path in ("/v1/models", "/metrics", "/version", "/ready"):
                assert httpx.get(server.url + path, headers=headers).status_code == status
            unknown = httpx.get(server.url + "/nothing", headers=headers).status_code
            assert unknown == (404 if status == 200 else 401)
        assert httpx.get(server.url + "/health").status_code == 200
        assert server.stop() == 0
        assert "first" not in log.read_text()
    finally:
        if server.process.poll() is None:
            server.process.kill()


def test_a_timeout_is_an_error(server: RunningServer) -> None:
    response = server.post("/v1/completions", {**ENDLESS, "timeout": 0.001})
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"
    # As long as nothing was sent, a stream has a status of its own too.
    assert server.post("/v1/completions", {**ENDLESS, "timeout": 1e-9, "stream": True}).status_code == 408


def test_a_port_that_is_taken_is_said_at_once(server: RunningServer, tiny_folder: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_folder), "--port", port]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode in (1, 2)
    assert b"--port" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_model_that_cannot_load_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "serve", str(tmp_path), "--port", "0"], capture_output=True, timeout=60
    )
    assert done.returncode in (1, 2)
    assert b"no .safetensors" in done.stderr
    assert b"Traceback" not in done.stderr

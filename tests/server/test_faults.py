"""Engines that die or hang under load, draining under load, API keys, and failing starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.raw_client import Answer, RawClient, post
from tests.server.running_server import HTTP, NAME, RunningServer, start_server, wait_for

PATH = "/v1/completions"
ENDLESS = {"model": NAME, "prompt": "a chairlift never stops", "max_tokens": 200, "ignore_eos": True}
NUM_CLIENTS = 40


@pytest.fixture(scope="module")
def restartable(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ("--drain-timeout", "300", "--heartbeat-timeout", "20")
    server = start_server(tiny_folder, tmp_path_factory.mktemp("restartable") / "log", *options)
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0, server.tail()


def long_request(index: int) -> dict[str, Any]:
    return {**ENDLESS, "prompt": f"song number {index}", "temperature": 0, "stream": True}


async def start_streams(server: RunningServer) -> list[asyncio.Task[Answer]]:
    """Many clients with unfinished streams. The engine is suspended when this returns, so none can finish."""
    before, engine = server.metric("chairlift_output_tokens_total"), server.engine_pid()
    os.kill(engine, signal.SIGSTOP)  # until all requests arrived
    clients = [await RawClient.post(server.url + PATH, long_request(index)) for index in range(NUM_CLIENTS)]
    answers = [asyncio.create_task(client.answer()) for client in clients]
    while server.metric("chairlift_requests_open") < NUM_CLIENTS:
        await asyncio.sleep(0.01)
    while server.metric("chairlift_output_tokens_total") < before + NUM_CLIENTS:
        os.kill(engine, signal.SIGCONT)
        await asyncio.sleep(0.01)
        os.kill(engine, signal.SIGSTOP)
    assert server.metric("chairlift_requests_open") == NUM_CLIENTS
    return answers


def descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return children + [deeper for child in children for deeper in descendants(child)]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_engine_that_dies_under_load_ends_all_streams_and_is_restarted(
    restartable: RunningServer, how: signal.Signals
) -> None:
    engine, files = restartable.engine_pid(), open_files(restartable.process.pid)

    async def check() -> list[Answer]:
        answers = await start_streams(restartable)
        os.kill(engine, how)
        async with asyncio.timeout(120):
            return await asyncio.gather(*answers)

    cut_off = asyncio.run(check())
    restartable.wait_until("/health", 200)
    assert restartable.engine_pid() != engine
    assert restartable.metric("chairlift_engine_restarts_total") >= 1
    whole = asyncio.run(all_responses(restartable))
    for answer, full in zip(cut_off, whole, strict=True):
        assert answer.status in (200, 503)  # 503 if it had no output yet
        assert answer.error is not None
        assert answer.error["type"] == "service_unavailable"
        assert full.text.startswith(answer.text), "the text belongs to another request"
        assert full.complete
    restartable.wait_idle()
    assert restartable.metric("chairlift_requests_open") == 0
    wait_for(lambda: open_files(restartable.process.pid) <= files, "the front end's files to be closed")


async def all_responses(server: RunningServer) -> list[Answer]:
    return await asyncio.gather(*(post(server.url + PATH, long_request(index)) for index in range(NUM_CLIENTS)))


def test_sigterm_under_load_drains_and_leaves_no_child(restartable: RunningServer) -> None:
    """Must be the last test with this server, because it ends it."""
    expected = asyncio.run(all_responses(restartable))
    children = descendants(restartable.process.pid)
    assert children

    async def check() -> list[Answer]:
        answers = await start_streams(restartable)
        restartable.process.send_signal(signal.SIGTERM)
        while restartable.get("/ready").status_code != 503:
            await asyncio.sleep(0.01)
        refused = restartable.post(PATH, ENDLESS)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert restartable.get("/health").status_code == 200
        os.kill(restartable.engine_pid(), signal.SIGCONT)
        async with asyncio.timeout(240):
            return await asyncio.gather(*answers)

    finished = asyncio.run(check())
    assert restartable.process.wait(60) == 0, restartable.tail()
    assert [answer.text for answer in finished] == [answer.text for answer in expected]
    assert all(answer.complete for answer in finished)
    for child in children:
        wait_for(lambda child=child: not Path(f"/proc/{child}").exists(), "the children to exit")


def test_an_engine_exits_when_its_front_end_is_killed(tiny_folder: Path, tmp_path: Path) -> None:
    server = start_server(tiny_folder, tmp_path / "log")
    children = descendants(server.process.pid)
    assert children
    os.kill(server.engine_pid(), signal.SIGSTOP)  # as in a long computation, it cannot notice by itself
    server.process.kill()
    server.process.wait(30)
    for child in children:
        wait_for(lambda child=child: not Path(f"/proc/{child}").exists(), "the engine to exit")


def test_an_engine_that_is_loading_exits_when_its_front_end_is_killed(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_folder), "--port", "0", "--kv-memory", "2MiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: process.poll() is not None or descendants(process.pid), "the engine process")
    children = descendants(process.pid)
    process.kill()
    process.wait(30)
    for child in children:
        wait_for(lambda child=child: not Path(f"/proc/{child}").exists(), "the engine to exit")


def test_sigterm_while_loading_exits(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_folder), "--port", "0", "--kv-memory", "2MiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: process.poll() is not None or descendants(process.pid), "the engine process")
    children = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    for child in children:
        wait_for(lambda child=child: not Path(f"/proc/{child}").exists(), "the engine to exit")


@pytest.fixture(scope="module")
def locked(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("second-key\n\n  third-key  \n")
    options = ("--api-key", "first-key", "--api-key-file", str(folder / "keys"), "--isolate-keys")
    server = start_server(tiny_folder, folder / "log", *options, CHAIRLIFT_API_KEY="fourth-key")
    yield server
    assert server.stop() == 0
    log = server.log.read_text()
    assert "the API key of 'key-1' has fewer than 16 characters" in log
    for secret in ("first-key", "second-key", "third-key", "fourth-key", "my private prompt"):
        assert secret not in log


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_the_probes_needs_a_key(locked: RunningServer) -> None:
    good = [bearer(f"{name}-key") for name in ("first", "second", "third", "fourth")]
    bad = [{}, bearer("wrong"), {"Authorization": "Bearer"}, bearer("first-key2"), {"Authorization": "first-key"}]
    bad += [{"Authorization": "Basic first-key"}, bearer("FIRST-KEY"), {"X-Api-Key": "wrong"}]
    good.append({"X-Api-Key": "first-key"})
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
        known = {"/nothing": 404, "/metrics": 403}.get(path, 200)  # no key is an administrator's
        assert [HTTP.get(locked.url + path, headers=headers).status_code for headers in good] == [known] * len(good)
        for headers in bad:
            refused = HTTP.get(locked.url + path, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["x-request-id"]
    for path in (PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/api/chat", "/infill"):
        assert HTTP.post(locked.url + path, json={}).status_code == 401
    assert HTTP.get(locked.url + "/health").status_code == HTTP.get(locked.url + "/ready").status_code == 200
    assert HTTP.get(locked.url + "/health/", headers=bearer("wrong")).status_code == 401
    lower = {"authorization": "bearer second-key"}
    assert HTTP.get(locked.url + "/version", headers=lower).status_code == 200


def test_keys_do_not_share_cached_prefixes(locked: RunningServer) -> None:
    prompt = "my private prompt, which no other key may find in the cache by its timing"

    def cached(key: str, salt: str | None = None) -> int:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = HTTP.post(locked.url + PATH, json=body, headers=bearer(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("first-key") == 0
    assert cached("second-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") > 0
    assert cached("first-key", "salt") == 0  # the client's own salt counts too
    assert cached("second-key", "salt") == 0
    assert cached("first-key", "salt") > 0


def test_isolate_keys_needs_api_keys(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_folder), "--port", "0", "--isolate-keys"]
    environment = {name: value for name, value in os.environ.items() if name != "CHAIRLIFT_API_KEY"}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert done.returncode in (1, 2)
    assert b"--api-key" in done.stderr


def test_a_timeout_is_answered_with_408(server: RunningServer) -> None:
    response = server.post("/v1/completions", {**ENDLESS, "timeout": 0.001})
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"
    # Before its first event, a stream can still have an error status.
    assert server.post("/v1/completions", {**ENDLESS, "timeout": 1e-9, "stream": True}).status_code == 408


def test_a_port_in_use_is_reported_at_once(server: RunningServer, tiny_folder: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_folder), "--port", port]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode in (1, 2)
    assert b"--port" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-memory", "100TB"], b"--kv-memory: 93132.26 GiB is more than"),
        (["--device", "cuda"], b"--device: there is no CUDA device here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_cannot_work_fail_once_with_one_line(tiny_folder: Path, options: list[str], named: bytes) -> None:
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_folder), "--port", "0", "--quiet", *options]
    done = subprocess.run(command, capture_output=True, timeout=120, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_cannot_load_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "serve", str(tmp_path), "--port", "0"], capture_output=True, timeout=120
    )
    assert done.returncode in (1, 2)
    assert b"no .safetensors" in done.stderr
    assert b"Traceback" not in done.stderr

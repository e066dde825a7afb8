"""Several HTTP processes in front of one engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from chairlift.core.request import RequestLimits
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey, KeySources
from chairlift.server.config import ServerConfig, decode_config, encode_config
from chairlift.server.http.listener import Certificate
from chairlift.server.metrics import Metrics, add_samples
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Loaded, Submit, Update
from chairlift.server.workers.channel import Channel, ForHub, ForWorker, WireError
from chairlift.server.workers.hub import Hub, WorkerLink, WorkerPool
from chairlift.server.workers.worker import Grants, RemoteAdmission, RemoteEngine
from tests.server.front_end import ScriptedEngine, stay_silent
from tests.server.running_server import HTTP, NAME, RunningServer, start_server, wait_for

KEYS = """
alice: {key: sk-alice, concurrent_requests: 3}
bob: {key: sk-bob, requests_per_minute: 4}
root: {key: sk-root}
"""
ROOT = {"authorization": "Bearer sk-root"}
BODY = {"model": NAME, "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
LONG = BODY | {"max_tokens": 200, "stream": True}


@pytest.fixture(scope="module")
def workers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "keys.yaml").write_text(KEYS)
    options = ["--api-workers", "2", "--api-key-file", str(folder / "keys.yaml"), "--max-waiting", "8"]
    running = start_server(
        tiny_folder,
        folder / "log",
        *options,
        "--max-batch-requests",
        "4",
        "--public-metrics",
    )
    yield running
    assert (running.process.poll() if running.process.poll() is not None else running.stop()) == 0, running.tail()


def post(server: RunningServer, key: str = "sk-root", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return HTTP.post(server.url + "/v1/completions", json=BODY | body, headers=headers)


def worker_pids(server: RunningServer) -> list[int]:
    """The processes that hold the listening socket, without the hub."""
    found = []
    for pid in server._children():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"chairlift.server.workers.worker" in command:
            found.append(pid)
    return found


def workers_engine(server: RunningServer) -> int:
    """The process of the engine; 0 while there is none."""
    pids = (pid for pid in server._children() if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return next(pids, 0)


@contextmanager
def suspended_engine(server: RunningServer) -> Iterator[int]:
    """Suspend the engine; one that is silent for ten seconds is replaced."""
    engine = workers_engine(server)
    os.kill(engine, signal.SIGSTOP)
    try:
        yield engine
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


@contextmanager
def dashboard_page(server: RunningServer) -> Iterator[httpx.Response]:
    with (
        httpx.Client(timeout=60) as client,
        client.stream("GET", server.url + "/dashboard/stream", headers=ROOT) as page,
    ):
        yield page


def test_all_workers_answer_the_same_and_their_metrics_add_up(workers: RunningServer) -> None:
    assert len(worker_pids(workers)) == 2
    before = {name: workers.metric(f"chairlift_{name}") for name in ("output_tokens_total", "end_to_end_seconds_count")}
    answers = [post(workers) for _ in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    for _ in range(6):  # whichever worker answers
        assert workers.metric("chairlift_output_tokens_total") == before["output_tokens_total"] + 48
        assert workers.metric("chairlift_end_to_end_seconds_count") == before["end_to_end_seconds_count"] + 12
    assert workers.metric_of("chairlift_requests_total", reason="length") >= 12
    assert workers.metric("chairlift_engine_up") == 1
    assert workers.metric("chairlift_kv_blocks_total") > 0


def test_concurrent_connections_are_shared_by_the_workers(workers: RunningServer) -> None:
    def connections(pid: int) -> int:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        return sum(link.startswith("socket:") for link in links)

    before = {pid: connections(pid) for pid in worker_pids(workers)}

    def grown() -> list[int]:
        return [connections(pid) - count for pid, count in before.items()]

    with ExitStack() as opened:
        client = opened.enter_context(httpx.Client(limits=httpx.Limits(max_connections=None), timeout=60))
        count = 0
        while min(grown()) < 1:  # the kernel chooses the worker, and may prefer one while the other is busy
            assert (count := count + 1) <= 200
            page = client.stream("GET", workers.url + "/dashboard/stream", headers=ROOT)
            assert opened.enter_context(page).status_code == 200
        assert sum(grown()) == count


def test_limits_hold_across_the_workers(workers: RunningServer) -> None:
    answers = [post(workers, "sk-bob") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
    remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert remaining == ["3", "2", "1", "0", "0", "0"]
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert workers.metric_of("chairlift_requests_rate_limited_total", key="bob", limit="requests") == 2


def test_the_queue_is_one_for_all_workers(workers: RunningServer) -> None:
    """4 slots and a queue of 8: of 12 requests for 3 completions at once, 4 are admitted, by whichever worker."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(post(workers, n=3).status_code)) for _ in range(12)]
    with suspended_engine(workers):
        for thread in threads:
            thread.start()
        wait_for(lambda: len(statuses) == 8, "the refusals")
    for thread in threads:
        thread.join(60)
    assert statuses == [429] * 8 + [200] * 4
    too_many = post(workers, n=13)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
    workers.wait_idle()
    assert workers.metric("chairlift_requests_open") == 0


def test_a_tenant_has_its_share_of_the_queue_across_the_workers(workers: RunningServer) -> None:
    rounds = (statuses_of_a_full_queue(workers) for _ in range(3))
    statuses = next(found for found in rounds if found)
    assert sorted(statuses) == [("sk-alice", 200), *[("sk-root", 200)] * 11, ("sk-root", 429)]


def statuses_of_a_full_queue(workers: RunningServer) -> list[tuple[str, int]]:
    """Fill the queue as one tenant, then ask as another; empty if the engine was replaced before that was done."""
    statuses: list[tuple[str, int]] = []

    def ask(key: str) -> None:
        statuses.append((key, post(workers, key).status_code))

    with suspended_engine(workers) as engine:  # so that all requests wait

        def replaced() -> bool:
            return workers_engine(workers) != engine

        threads = [threading.Thread(target=ask, args=("sk-root",)) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_for(lambda: workers.metric("chairlift_requests_open") == 12 or replaced(), "the queue to be full")
        threads.append(threading.Thread(target=ask, args=("sk-alice",)))
        threads[-1].start()
        wait_for(lambda: statuses or replaced(), "a request to be displaced")
        in_time = not replaced()
    for thread in threads:
        thread.join(60)
    wait_for(lambda: HTTP.get(workers.url + "/ready").status_code == 200, "the engine to be ready")
    return statuses if in_time else []


def test_clients_that_disconnect_leave_nothing_behind(workers: RunningServer) -> None:
    async def storm() -> list[int]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as client:

            async def one(number: int) -> int:
                stream = client.stream("POST", workers.url + "/v1/completions", json=LONG, headers=ROOT)
                async with stream as answer:
                    if number % 2:
                        return answer.status_code  # disconnects at once
                    text = (await answer.aread()).decode()
                    assert answer.status_code == 429 or text.rstrip().endswith("[DONE]")
                    return answer.status_code

            return await asyncio.gather(*map(one, range(80)))

    assert 200 in (found := set(asyncio.run(storm())))
    assert found <= {200, 429}
    workers.wait_idle()
    wait_for(lambda: workers.metric("chairlift_requests_open") == 0, "all requests to end")
    assert post(workers, n=12).status_code == 200  # all of the capacity


def test_errors_of_the_engine_keep_their_parameter(workers: RunningServer) -> None:
    refused = post(workers, guided_regex="(")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    too_long = post(workers, prompt="a " * 3000)
    assert too_long.status_code == 400


def test_a_killed_worker_is_replaced_and_what_it_held_is_freed(workers: RunningServer) -> None:
    tokens = workers.metric("chairlift_output_tokens_total")
    connections: list[Any] = []
    clients = [httpx.Client(timeout=60) for _ in range(3)]
    for client in clients:  # all of alice's concurrent requests
        stream = client.stream(
            "POST", workers.url + "/v1/completions", json=LONG, headers={"authorization": "Bearer sk-alice"}
        )
        connections.append(stream)
        assert stream.__enter__().status_code == 200
    first, second = worker_pids(workers)
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGKILL)
    for client in clients:
        client.close()
    wait_for(lambda: len(set(worker_pids(workers)) - {first, second}) == 2, "new workers")
    wait_for(lambda: _status(workers, "sk-alice") == 200, "the new workers to answer, and alice's slots to be free")
    workers.wait_idle()
    assert workers.metric("chairlift_worker_restarts_total") == 2
    assert workers.metric("chairlift_output_tokens_total") >= tokens  # counters do not fall
    assert workers.metric("chairlift_requests_open") == 0


def _status(server: RunningServer, key: str) -> int | None:
    try:
        return post(server, key).status_code
    except httpx.TransportError:
        return None


def test_the_engine_is_restarted_for_all_workers(workers: RunningServer) -> None:
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", workers.url + "/v1/completions", json=LONG | {"max_tokens": 250}, headers=ROOT) as answer,
    ):
        assert answer.status_code == 200
        os.kill(workers_engine(workers), signal.SIGKILL)
        last = [line for line in answer.iter_lines() if line][-1]
    assert "error" in last or "[DONE]" in last  # it may have been finished before
    workers.wait_until("/health", 503)
    workers.wait_until("/health", 200)
    wait_for(lambda: post(workers).status_code == 200, "an answer of the new engine")


def test_keys_are_reloaded_in_all_workers(workers: RunningServer) -> None:
    file = workers.log.parent / "keys.yaml"
    file.write_text(KEYS + "carol: {key: sk-carol}\n")
    workers.process.send_signal(signal.SIGHUP)
    wait_for(lambda: [post(workers, "sk-carol").status_code for _ in range(8)] == [200] * 8, "the new key")


def test_the_dashboard_finds_texts_of_all_workers(workers: RunningServer) -> None:
    def text_of(request_id: str) -> httpx.Response:
        return HTTP.get(f"{workers.url}/dashboard/requests/{request_id}", headers=ROOT)

    def both_know_a_request() -> bool:
        """Whether every worker, of which any may be asked, knows the text of a new request."""
        request_id = f"{post(workers).json()['id']}-0"
        return all(text_of(request_id).status_code == 200 for _ in range(8))

    with dashboard_page(workers) as page:
        assert page.status_code == 200
        wait_for(both_know_a_request, "all workers to keep texts")
        for _ in range(8):
            assert both_know_a_request()
        request_id = f"{post(workers, prompt='hello').json()['id']}-0"
        assert text_of(request_id).json()["prompt"] == "hello"
        other = {"authorization": "Bearer sk-alice"}
        assert HTTP.get(f"{workers.url}/dashboard/requests/{request_id}", headers=other).status_code == 404
    wait_for(lambda: text_of(request_id).status_code == 404, "the texts to be forgotten")


@pytest.mark.slow
def test_a_suspended_worker_is_replaced(workers: RunningServer) -> None:
    stuck, other = worker_pids(workers)
    os.kill(stuck, signal.SIGSTOP)
    wait_for(lambda: stuck not in worker_pids(workers) and len(worker_pids(workers)) == 2, "the replacement")
    assert other in worker_pids(workers)
    wait_for(lambda: [_status(workers, "sk-root") for _ in range(6)] == [200] * 6, "all workers to answer")


def test_a_dashboard_page_shows_the_whole_server(workers: RunningServer) -> None:
    with dashboard_page(workers) as page:
        end, kinds = time.monotonic() + 30, set[str]()
        for line in page.iter_lines():
            if '"t":"service"' in line and "output_tokens_total" in line:
                kinds.add("service")
            elif '"t":"' in line:
                kinds.add("frame")
            if kinds == {"service", "frame"} or time.monotonic() > end:
                break
    assert kinds == {"service", "frame"}


# ---- parts ----------------------------------------------------------------------------------------------------------


class RecordedCalls:
    """A channel that keeps what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def tell(self, method: Any, *arguments: Any) -> None:
        self.calls.append((method, *arguments))


def test_the_hub_forgets_streams_that_are_finished_or_cancelled() -> None:
    async def check() -> None:
        metrics = Metrics()
        engine = ScriptedEngine(metrics, stay_silent)
        hub, channel = Hub(engine, metrics, Limits()), RecordedCalls()
        await engine.start()
        link = WorkerLink(hub, channel)  # type: ignore[arg-type]
        for name in ("a", "b", "c"):
            link.submit([Submit(name, [1], SamplingParams(n=2), None, "")])
        for one in ("a", "a#1", "b"):
            engine.requests.deliver(Update(one, text="x", tokens=[1], finish_reason="stop"))
        assert link._streams.keys() == {"b", "c"}
        await asyncio.sleep(0)
        ((method, updates),) = channel.calls
        assert method is ForWorker.deliver
        assert [update.request_id for update in updates] == ["a", "a#1", "b"]
        link.cancel("b")
        assert link._streams.keys() == {"c"}
        assert engine.num_open == 2
        link.release_all()
        assert engine.num_open == 0
        assert not link._streams
        await engine.stop()

    asyncio.run(check())


class StoppableProcess:
    """A worker's process that exits when it is told to, and never else."""

    def __init__(self, channel: socket.socket) -> None:
        self.returncode: int | None = None
        self._exit = asyncio.create_task(self._run(channel))

    async def _run(self, end: socket.socket) -> None:
        self._channel = await Channel.open(end)
        await self._channel.serve(self, ForWorker)
        self.returncode = 0

    def configure(self, config: bytes, chat_template: str | None, keys: list[APIKey]) -> None:
        """It needs no configuration."""

    def set_engine(self, state: str, loaded: Loaded | None) -> None:
        """It submits nothing."""

    def shut_down(self, drain: bool) -> None:
        self._channel.close()

    async def wait(self) -> None:
        await self._exit


def test_a_reservation_that_is_displaced_as_it_is_granted_is_given_up() -> None:
    """A busy worker reads the grant and the displacement in one go."""

    class GrantAndDisplace(RecordedCalls):
        async def ask(self, method: Any, number: int, *arguments: Any) -> None:
            admission.displace(number)

    channel = GrantAndDisplace()
    engine = RemoteEngine(cast(Any, channel))
    engine.loaded = Loaded(RequestLimits(vocab_size=320, max_model_len=256), max_batch_requests=8)
    admission = RemoteAdmission(Grants(cast(Any, channel)), engine, Metrics(), Limits())

    async def prepare() -> None:
        async with admission.reserve(1, 1, "alice"):
            await asyncio.sleep(60)

    with pytest.raises(APIError, match="the queue is full"):
        asyncio.run(prepare())
    assert (ForHub.release, 0, 0) in channel.calls


def test_a_worker_that_starts_while_the_server_stops_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        metrics = Metrics()
        pool = WorkerPool(
            ServerConfig("m", ["m"], {}, api_workers=2), None, ScriptedEngine(metrics, stay_silent), metrics
        )

        async def spawn(*command: str, pass_fds: list[int]) -> StoppableProcess:
            pool.drain()
            return StoppableProcess(socket.socket(fileno=os.dup(pass_fds[0])))

        monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
        with socket.socket() as listener:
            assert await asyncio.wait_for(pool._run_worker(listener), 60) == 0
        assert pool.is_idle
        await pool.engine.stop()

    asyncio.run(check())


def test_a_configuration_survives_the_way_to_a_worker() -> None:
    config = ServerConfig(
        "m",
        ["a", "b"],
        {"kv_memory": "1GiB", "tenant_weights": ["a=1"]},
        certificate=Certificate(Path("c"), Path("k")),
        access_log=Path("-"),
        keys=KeySources(["x"], Path("keys")),
        cors_origins=["*"],
        allowed_hosts=["h"],
        image_hosts=["i"],
        limits=Limits(tenant_weights={"a": 2.0}),
    )
    assert decode_config(encode_config(config)) == config


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameter("n", "too many"),
        APIError(429, "busy", type_="t", code="c", headers={"Retry-After": "1"}),
        APIError(400, "wrong", param="p"),
    ],
    ids=str,
)
def test_errors_survive_the_way_to_a_worker(error: Exception) -> None:
    found = WireError.of(error).exception()
    assert type(found) is type(error)
    if isinstance(error, APIError):
        assert isinstance(found, APIError)
        assert (found.body, found.status_code, found.headers) == (error.body, error.status_code, error.headers)
    else:
        assert str(found) == str(error)


def test_samples_of_workers_are_added() -> None:
    hub, worker = Metrics(), Metrics()
    worker.requests.labels("stop").inc(2)
    hub.requests.labels("length").inc(1)
    worker.first_token.observe(0.02)
    hub.first_token.observe(0.3)
    worker.running.set(7)  # a gauge of the engine belongs to the hub
    hub.other_samples = lambda: [*worker.samples(), *worker.samples()]
    text = asyncio.run(hub.exposition()).decode()
    for line in (
        'chairlift_requests_total{reason="stop"} 4.0',
        'chairlift_requests_total{reason="length"} 1.0',
        'chairlift_time_to_first_token_seconds_bucket{le="0.025"} 2.0',
        'chairlift_time_to_first_token_seconds_bucket{le="+Inf"} 3.0',
        "chairlift_time_to_first_token_seconds_count 3.0",
        "chairlift_requests_running 0.0",
    ):
        assert line in text
    families = list(hub._registry.collect())
    add_samples(families, [])
    assert hub.values()["requests_total stop"] == 4


def test_running_requests_finish_when_the_server_is_stopped(workers: RunningServer) -> None:
    """The last test with this server."""
    chunks: list[str] = []

    def read() -> None:
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", workers.url + "/v1/completions", json=LONG, headers=ROOT) as answer,
        ):
            chunks.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: chunks or not reader.is_alive(), "the stream to begin")
    pids = worker_pids(workers)
    assert workers.stop() == 0, workers.tail()
    reader.join(30)
    assert chunks[-1] == "data: [DONE]"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

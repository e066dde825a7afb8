"""Loads on servers: one that misbehaves in every way, and a real one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.client.http import Address, HttpClient
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.client import ClosedLoop, LoadClient, LoadGenerator, LoadRun, OpenLoop, RequestFormat
from chairlift_lab.load.figures import LatencyLimits, load_row
from chairlift_lab.load.local_server import LocalServer, engine_arguments, local_server
from tests.tiny import write_tiny_checkpoint

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"
REQUEST = BenchRequest((5, 6, 7), 3)
TINY = {"device": "cpu", "kv_memory": "2MiB", "prefix_caching": True, "max_model_len": None}

# ---- a scripted server -------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"0\r\n\r\n"


def chunk(body: Any) -> bytes:
    data = b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def said(text: str, finish: str | None = None) -> bytes:
    return chunk({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


USAGE = chunk({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
GOOD = HEAD + said("a") + said("") + said("b", "length") + USAGE + chunk(b"[DONE]") + DONE
REFUSED = json.dumps({"error": {"message": "later", "type": "rate_limit_error", "code": "queue_full"}}).encode()
ANSWERS = {
    "good": (GOOD, None),
    "full": (b"HTTP/1.1 429 No\r\nContent-Length: %d\r\n\r\n%b" % (len(REFUSED), REFUSED), "HTTP 429 queue_full"),
    "html": (b"HTTP/1.1 502 Bad\r\nContent-Length: 6\r\n\r\n<html>", "HTTP 502"),
    "error in the stream": (
        HEAD + said("a") + chunk({"error": {"code": None, "type": "server_error"}}) + chunk(b"[DONE]") + DONE,
        "stream: server_error",
    ),
    "no end": (HEAD + said("a") + DONE, "stream: ended too early"),
    "cut off": (HEAD + said("a"), "connection: the server closed the connection"),
    "no JSON": (HEAD + chunk(b"{") + said("", "stop") + DONE, "bad stream: an event that is not in OpenAI's format"),
    "no HTTP": (b"220 mail.example.org ready\r\n\r\n", "bad response: no HTTP/1.1"),
    "nothing": (b"", "connection: the server closed the connection"),
    "silence": (None, "timeout"),
}


async def serving(answer: bytes | None, use: Callable[[HttpClient], Awaitable[LoadRun]]) -> LoadRun:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            body = json.loads(await reader.readexactly(int(length[1])))
            assert body["prompt"] == [5, 6, 7]
            if answer is None:
                await asyncio.sleep(60)
            assert answer is not None
            writer.write(answer)
            if not answer.endswith((DONE, REFUSED)):
                break
        writer.close()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    http = HttpClient(Address("127.0.0.1", server.sockets[0].getsockname()[1], False, ""))
    try:
        return await use(http)
    finally:
        http.close()
        server.close()


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_request_ends_with_success_or_an_error(kind: str) -> None:
    answer, expected = ANSWERS[kind]

    async def use(http: HttpClient) -> LoadRun:
        client = LoadClient(http, RequestFormat("m"), timeout=0.2 if answer is None else 30)
        return await LoadGenerator(client.send).run([REQUEST] * 5, ClosedLoop(2))

    run = asyncio.run(serving(answer, use))
    assert [record.error for record in run.records] == [expected] * 5
    assert all(record.sent <= record.end for record in run.records)
    row = load_row("server", [run], LatencyLimits())
    assert row["completed"] == (5 if kind == "good" else 0)
    assert row["errors"] == ({} if kind == "good" else {expected: 5})


def test_usage_counts_and_pieces_are_timed() -> None:
    async def use(http: HttpClient) -> LoadRun:
        return await LoadGenerator(LoadClient(http, RequestFormat("m"), timeout=30).send).run([REQUEST], ClosedLoop(1))

    [record] = asyncio.run(serving(GOOD, use)).records
    assert (record.input_tokens, record.output_tokens) == (9, 4)
    assert len(record.times) == 3  # a piece without text is half a character
    assert record.sent <= record.times[0] <= record.times[-1] <= record.end


def test_an_unreachable_server_is_an_error_of_the_request() -> None:
    async def main() -> LoadRun:
        client = LoadClient(HttpClient(Address("127.0.0.1", 1, False, "")), RequestFormat("m"), timeout=30)
        return await LoadGenerator(client.send).run([REQUEST], ClosedLoop(1))

    [record] = asyncio.run(main()).records
    assert (record.error or "").startswith("connection: ")


def test_a_chat_prompt_consists_of_words() -> None:
    body = json.loads(RequestFormat("m", "chat", ignore_eos=False, extra={"top_k": 5, "temperature": 1}).body(REQUEST))
    assert len(body["messages"][0]["content"].split()) == 3
    assert (body["max_tokens"], body["stream"], body["top_k"], body["temperature"]) == (3, True, 5, 1)
    assert "ignore_eos" not in body
    assert json.loads(RequestFormat("m").body(REQUEST))["ignore_eos"] is True


# ---- loops -------------------------------------------------------------------------------------------------------


class Service:
    """Takes a moment for each request, and counts the requests in flight."""

    def __init__(self, moment: float) -> None:
        self.moment, self.open, self.peak = moment, 0, 0

    async def send(self, request: BenchRequest, record: Any, now: Callable[[], float]) -> None:
        self.open += 1
        self.peak = max(self.peak, self.open)
        await asyncio.sleep(self.moment)
        self.open -= 1
        record.end = now()


def test_a_closed_loop_never_exceeds_its_concurrency() -> None:
    service = Service(0.001)
    run = asyncio.run(LoadGenerator(service.send).run([REQUEST] * 40, ClosedLoop(6)))
    assert service.peak == 6
    assert len(run.records) == 40


def test_an_open_loop_does_not_wait_for_answers() -> None:
    service = Service(0.2)
    run = asyncio.run(
        LoadGenerator(service.send).run([REQUEST] * 30, OpenLoop(lambda: iter([index / 1000 for index in range(30)])))
    )
    assert service.peak == 30
    assert [record.due for record in run.records] == [index / 1000 for index in range(30)]
    assert all(record.sent >= record.due for record in run.records)


def test_a_duration_ends_an_endless_load() -> None:
    def endless() -> Iterator[BenchRequest]:
        while True:
            yield REQUEST

    closed = asyncio.run(LoadGenerator(Service(0.01).send, duration=0.1).run(endless(), ClosedLoop(2)))
    assert 2 <= len(closed.records) <= 22
    assert all(record.sent < 0.1 and record.end for record in closed.records)
    times = OpenLoop(lambda: iter([0.0, 0.04, 0.08, 0.12, 0.16]))
    assert len(asyncio.run(LoadGenerator(Service(0.01).send, duration=0.1).run(endless(), times)).records) == 3


# ---- a real server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CHAIRLIFT_API_KEY", "not for this one")
        with local_server(tiny, TINY, max_waiting=100) as running:
            yield running
    assert running.process.returncode == 0


def bench(*arguments: str, report: Path, **variables: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments, "--json", str(report)], env=variables)
    assert result.exit_code == 0, result.output
    written: dict[str, Any] = json.loads(report.read_text())
    return written


LENGTHS = ["--prompt-len", "4:40", "--output-len", "2:9"]


def test_lengths_are_exact_on_a_real_server(server: LocalServer, tmp_path: Path) -> None:
    options = ["--url", server.url, "--token-ids", "10:300", *LENGTHS, "--concurrency", "3", "--num-requests", "20"]
    report = bench(*options, "--plot", str(tmp_path / "load.png"), report=tmp_path / "report.json")
    [row] = report["rows"]
    assert (row["completed"], row["errors"], row["peak_concurrency"]) == (20, {}, 3)
    again = bench(*options, report=tmp_path / "again.json")["rows"][0]
    assert [again[name] for name in ("input_tokens", "output_tokens")] == [
        row[name] for name in ("input_tokens", "output_tokens")
    ]
    assert again["cached_tokens"] > row["cached_tokens"]  # the same prompts once more
    assert 0 < row["ttft_p50_ms"] <= row["e2e_p50_ms"]
    assert row["cpu_seconds"]["client"] > 0
    assert report["settings"]["model"] == "bench"
    assert report["settings"]["engine"] is None
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert set(row) | set(report["settings"]) | {"front_end", "engine", "client"} <= documented
    assert (tmp_path / "load.png").stat().st_size > 10_000


def test_shared_prefixes_are_found_in_the_cache(server: LocalServer, tmp_path: Path) -> None:
    options = ["--url", server.url, "--token-ids", "10:300", "--prompt-len", "96", "--output-len", "2", "--seed", "5"]
    shared = ["--shared-prefix", "0.8", "--prefix-groups", "2", "--concurrency", "1", "--num-requests", "10"]
    [row] = bench(*options, *shared, report=tmp_path / "report.json")["rows"]
    assert row["input_tokens"] == 960
    # All but the first of each group find the whole blocks of what they share.
    assert row["cached_tokens"] >= 8 * (77 // 16 * 16)


def test_chats_and_open_loops_work(server: LocalServer, tmp_path: Path) -> None:
    options = [
        "--url",
        server.url,
        "--api",
        "chat",
        *LENGTHS,
        "--rate",
        "50",
        "--arrivals",
        "bursty",
        "--num-requests",
        "12",
    ]
    limits = ["--max-ttft-ms", "0.001"]
    report = bench(*options, *limits, report=tmp_path / "report.json")
    [row] = report["rows"]
    assert (row["completed"], row["errors"], row["goodput_per_s"]) == (12, {}, 0)
    assert row["output_tokens"] >= 12 * 2
    assert report["settings"]["loop"] == "open"


def test_a_trace_is_replayed(server: LocalServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{index},50,4\n" for index in range(6)) + "9,9000,5\n"
    )
    options = ["--url", server.url, "--token-ids", "10:300", "--trace", str(trace), "--trace-speed", "50"]
    [row] = bench(*options, report=tmp_path / "report.json")["rows"]
    assert (row["completed"], row["input_tokens"], row["output_tokens"]) == (6, 300, 24)
    assert row["seconds"] >= 0.1


def test_refusals_are_counted(server: LocalServer, tmp_path: Path) -> None:
    extra = ["--extra-body", '{"temprature": 1}', "--warmup", "0", "--num-requests", "4", "--concurrency", "2"]
    options = ["--url", server.url, "--token-ids", "10:300", *LENGTHS]
    [row] = bench(*options, *extra, report=tmp_path / "report.json")["rows"]
    assert row["errors"] == {"HTTP 400 unknown_parameter": 4}
    result = CliRunner().invoke(app, ["bench", "serve", *options, "--extra-body", '{"temprature": 1}'])
    assert result.exit_code == 2
    assert "does not answer as it should: HTTP 400" in result.stderr


def test_the_engine_alone_does_the_same_work(tiny: str, tmp_path: Path) -> None:
    load = [*LENGTHS, "--concurrency", "3", "--num-requests", "8", "--compare-offline", "--quiet"]
    options = ["--model", tiny, "--device", "cpu", "--kv-memory", "2MiB", *load]
    report = bench(*options, report=tmp_path / "report.json", OMP_NUM_THREADS="1")
    server_row, offline = report["rows"]
    for name in ("completed", "input_tokens", "output_tokens"):
        assert server_row[name] == offline[name] > 0
    assert offline["peak_concurrency"] == server_row["peak_concurrency"] == 3
    assert set(server_row["cpu_seconds"]) == {"client", "front_end", "engine"}
    assert set(offline["cpu_seconds"]) == {"engine"}
    ratio = server_row["output_tokens_per_s"] / offline["output_tokens_per_s"]
    assert server_row["speedup_vs"] == {"offline": pytest.approx(ratio)}


def test_a_server_that_cannot_start_gives_the_reason(tiny: str) -> None:
    options = ["--model", tiny, "--prompt-len", "9", "--output-len", "2", "--kv-memory", "100"]
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    assert result.exit_code == 2
    assert re.search("the server did not start: .*--kv-memory", result.stderr)
    assert "Traceback" not in result.stderr


def test_engine_options_become_command_line_arguments() -> None:
    given = {"device": "cpu", "max_model_len": None, "prefix_caching": False, "block_size": 8}
    assert engine_arguments(given) == ["--device", "cpu", "--no-prefix-caching", "--block-size", "8"]
    weights = {"tenant_weights": ["alice=2", "bob=3"]}
    assert engine_arguments(weights) == ["--tenant-weight", "alice=2", "--tenant-weight", "bob=3"]

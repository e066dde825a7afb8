"""`bench soak`: it passes on a sound server, and finds what fails, changes or grows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen
from typing import cast

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.bench import soak
from chairlift_lab.bench.soak import ProcessSample, growth_problems, memory_growth
from chairlift_lab.common.timing import children
from chairlift_lab.load.local_server import LocalServer
from chairlift_lab.load.soak_traffic import KINDS, QUESTIONS, SoakRequest, SoakTraffic, answer_text, expect_ok
from tests.cluster.own_ray import own_ray
from tests.server.running_server import wait_for
from tests.tiny import write_tiny_checkpoint

MIB = 2**20


def chat_body(text: str | None, finish_reason: str = "stop", **message: object) -> bytes:
    choice = {"index": 0, "message": {"content": text} | message, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def streamed(*texts: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + end


def find_request(kind: str) -> SoakRequest:
    traffic = SoakTraffic("m", 0, dict.fromkeys(QUESTIONS, "the reference"))
    return next(request for request in iter(traffic.request, None) if request.kind == kind)


def test_answers_are_checked() -> None:
    assert expect_ok(200, streamed("a")) is None
    assert "incomplete" in str(expect_ok(200, streamed("a", end=b"")))
    waited = b": waiting\n\n" + streamed("a")
    assert expect_ok(200, waited) is None
    assert answer_text(waited) == "a"
    assert "incomplete" in str(expect_ok(200, b": waiting\n\n" + streamed("a", end=b"")))
    assert "HTTP 503" in str(expect_ok(503, b"{}"))
    greedy = find_request("greedy").check
    assert greedy(200, chat_body("the reference")) is None
    assert greedy(200, streamed("the ", "reference")) is None
    assert "instead of 'the reference'" in str(greedy(200, streamed("the ", "end")))
    structured = find_request("json").check
    assert structured(200, chat_body('{"city": "Oslo", "warm": true}')) is None
    assert structured(200, chat_body('{"city": "Os', "length")) is None  # truncated
    assert "breaks the schema" in str(structured(200, chat_body('{"city": "Oslo"}')))
    assert "is not JSON" in str(structured(200, chat_body("Oslo")))
    pattern = find_request("regex").check
    assert pattern(200, chat_body("12-ab")) is None
    assert "does not match" in str(pattern(200, chat_body("12-xy")))
    tool = find_request("tool").check
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo", "warm": false}'}}
    assert tool(200, chat_body(None, "tool_calls", tool_calls=[call])) is None
    assert tool(200, chat_body(None, "tool_calls", tool_calls=[call, call])) is None
    wrong = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    assert "breaks the schema" in str(tool(200, chat_body(None, "tool_calls", tool_calls=[call, wrong])))
    assert "is not JSON" in str(tool(200, chat_body("no call")))
    invalid = find_request("invalid").check
    assert invalid(400, b'{"error": {"message": "m"}}') is None
    assert "instead of 400" in str(invalid(200, b"{}"))
    assert answer_text(streamed("a", "b")) == "ab"


def test_growth_is_found() -> None:
    flat = [ProcessSample(100 * MIB, 20, 10)] * 50
    assert memory_growth([ProcessSample(0, 0, 0), *flat]) == 0  # the first samples are for warming up
    leak = [ProcessSample(100 * MIB + number * MIB, 20, 10) for number in range(50)]
    assert memory_growth(leak) == 30 * MIB
    before = flat[0]
    assert growth_problems("engine", before, before, 0, 8 * MIB) == []
    assert growth_problems("engine", before, before, 9 * MIB, 8 * MIB) == ["the engine's memory grew by 9.0 MiB"]
    more = growth_problems("front end", before, ProcessSample(0, 30, 20), 0, 0)
    assert more == [
        "the front end had 20 files before and 30 after the traffic",
        "the front end had 10 threads before and 20 after the traffic",
    ]


class ThisProcess:
    pid = os.getpid()


@contextmanager
def stub_server(answers: Callable[[int], bool]) -> Iterator[LocalServer]:
    """A server of this process that answers the requests whose number satisfies `answers`, and not the others."""
    numbers, release = iter(range(10**6)), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply("".join(f"chairlift_{name} 0.0\n" for name in (*soak.HELD, "kv_blocks_total")).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if not answers(next(numbers)):
                release.wait()
            self._reply(chat_body("the same"))

        def _reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield LocalServer(cast("Popen[bytes]", ThisProcess()), server.server_port)
        finally:
            release.set()
            server.shutdown()
            serving.join()


def soak_stub(monkeypatch: pytest.MonkeyPatch, answers: Callable[[int], bool]) -> soak.SoakFigures:
    monkeypatch.setattr(soak, "REQUEST_SECONDS", 0.5)
    plan = soak.SoakPlan(seconds=1.0, calibration_seconds=0.2, concurrency=2, memory_tolerance="100MiB")
    with stub_server(answers) as server:
        monkeypatch.setattr(soak, "local_server", lambda *_, **__: nullcontext(server))
        return soak.soak("stub", {}, plan, lambda _: None)


def test_a_server_that_hangs_is_found_and_the_bench_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(soak.SoakFailed, match="an idle server did not answer"):
        soak_stub(monkeypatch, lambda number: False)
    with pytest.raises(soak.SoakFailed, match="no request ended"):
        soak_stub(monkeypatch, lambda number: number < 6)
    figures = soak_stub(monkeypatch, lambda number: number < 40)
    assert any("no answer in 0.5 s" in problem for problem in figures.problems)
    assert figures.idle_after.keys() == {"front end"}


def run_soak(folder: Path, result: Path, *options: str) -> list[dict[str, object]]:
    command = ["bench", "soak", "--model", str(folder), "--json", str(result), "-q", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows: list[dict[str, object]] = json.loads(result.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_a_short_soak_of_a_tiny_model(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", positions=4096)
    options = ("--seconds", "3", "--calibration-seconds", "2", "--concurrency", "4", "--kv-memory", "8MiB")
    rows = run_soak(folder, tmp_path / "result.json", *options, "--memory-tolerance", "200MiB")
    assert {"front end", "engine"} <= {row["name"] for row in rows}
    assert {"greedy", "sampled"} <= {row["name"] for row in rows} <= {*KINDS, "front end", "engine"}


def test_a_terminated_bench_stops_its_server(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", positions=4096)
    command = [sys.executable, "-m", "chairlift", "bench", "soak", "--model", str(folder), "--kv-memory", "8MiB"]
    with Popen(command) as bench:
        while not (servers := children(bench.pid)):
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
    wait_for(lambda: not [pid for pid in servers if Path(f"/proc/{pid}").exists()], "the server to stop")


@pytest.mark.slow
def test_a_minute_of_soak_of_the_default_model(tmp_path: Path) -> None:
    rows = run_soak(Path("smollm2-135m"), tmp_path / "result.json", "--seconds", "60")
    assert {"front end", "engine", "greedy"} <= {row["name"] for row in rows} <= {*KINDS, "front end", "engine"}


@pytest.mark.slow
def test_a_short_soak_of_a_fleet(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
    folder = write_tiny_checkpoint(tmp_path / "tiny", positions=4096)
    options = ["--model", str(folder), "--replicas", "2", "--seconds", "3", "--calibration-seconds", "2"]
    options += ["--concurrency", "4", "--kv-memory", "8MiB", "--memory-tolerance", "200MiB", "-q"]
    with own_ray() as ray:
        command = [
            sys.executable,
            "-m",
            "chairlift",
            "bench",
            "soak",
            *options,
            "--json",
            str(tmp_path / "result.json"),
        ]
        done = subprocess.run(command, env=ray.environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    names = {row["name"] for row in json.loads((tmp_path / "result.json").read_text())["rows"]}
    assert {"ingress", "front end 1", "engine 1", "front end 2", "engine 2", "greedy"} <= names


def test_processes_of_a_fleet_are_named_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "server_processes", lambda pid: {"front end": pid, "engine": pid + 1})
    found = soak.fleet_processes(1, [20, 10])
    assert found == {"ingress": 1, "front end 1": 10, "engine 1": 11, "front end 2": 20, "engine 2": 21}

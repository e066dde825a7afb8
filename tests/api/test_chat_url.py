"""`chairlift chat --url`: a conversation with a real server, and with one that fails."""

from __future__ import annotations

import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.load.local_server import LocalServer, local_server


def chat(*arguments: str, stdin: str = "hello\n") -> Any:
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin, env={"COLUMNS": "200"})


# ---- a real server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with local_server(tiny, {"device": "cpu", "kv_memory": "2MiB"}, max_waiting=10) as running:
            yield running


OPTIONS = ["--max-tokens", "4", "--ignore-eos", "--temperature", "0"]


def test_answers_of_a_server_equal_those_of_the_model(server: LocalServer, tiny: str) -> None:
    lines = "a chairlift never stops\n/system be brief\nand neither does the engine\n"
    there = chat("--url", server.url, *OPTIONS, stdin=lines)
    here = chat("--model", tiny, "--device", "cpu", "--kv-memory", "2MiB", *OPTIONS, stdin=lines)
    assert there.exit_code == here.exit_code == 0, there.output
    assert there.stdout == here.stdout
    figures = r"4 tokens.* · first after .* · prompt of (\d+) tokens, (\d+) of them cached · stopped"
    assert re.findall(figures, there.stderr) == re.findall(figures, here.stderr)
    assert len(re.findall(figures, there.stderr)) == 2
    assert f"bench at {server.url}" in there.stderr


def test_quiet_prints_only_answers(server: LocalServer) -> None:
    result = chat("--url", f"{server.url}/v1", "--quiet", *OPTIONS)
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert not result.stderr


def test_a_refused_request_ends_a_piped_chat(server: LocalServer) -> None:
    result = chat("--url", server.url, "--quiet", *OPTIONS, stdin="word " * 300 + "\nhello\n")
    assert result.exit_code == 2
    assert "error: the server refuses (400): messages: " in result.stderr
    result = chat("--url", server.url, "--quiet", "--model", "gpt-4o", *OPTIONS)
    assert "the server refuses (404): the model 'gpt-4o' does not exist" in result.stderr


def test_ctrl_c_cancels_the_request_on_the_server(server: LocalServer) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "chairlift", "chat", "--url", server.url, "--ignore-eos", "--max-tokens", "200"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        output, notes = process.communicate(b"/reset\nagain\n", timeout=120)
    assert process.returncode == 0, notes
    assert " …\n".encode() in output
    assert b"200 tokens at " in notes
    ended = chat_metric(server, 'chairlift_requests_total{reason="cancelled"}')
    assert ended == 1


def chat_metric(server: LocalServer, name: str) -> float:
    from urllib.request import urlopen

    with urlopen(f"{server.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_options_of_an_engine_are_refused(server: LocalServer) -> None:
    result = chat("--url", server.url, "--kv-memory", "1GiB")
    assert result.exit_code == 2
    assert "--kv-memory: is for an own engine" in result.stderr


# ---- servers that fail -------------------------------------------------------------------------------------------


class Failing(BaseHTTPRequestHandler):
    answer = b""
    request_body: dict[str, Any]
    key = ""

    def do_GET(self) -> None:
        self.reply(b'{"data": [{"id": "some-model"}]}' if self.path == "/v1/models" else b"{}")

    def do_POST(self) -> None:
        Failing.request_body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Failing.key = self.headers.get("Authorization", "")
        self.reply(Failing.answer)

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def failing() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Failing) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DELTA = event({"choices": [{"delta": {"content": "well"}, "finish_reason": None}]})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (DELTA + event({"error": {"message": "out of memory"}}), "the server failed: out of memory"),
        (DELTA + b"data: {\n\n", "not what OpenAI has"),
        (event({"error": "busy"}), "the server failed: busy"),
    ],
)
def test_a_failing_server_is_an_error(failing: str, answer: bytes, problem: str) -> None:
    Failing.answer = answer
    result = chat("--url", failing, "--quiet")
    assert result.exit_code == 2
    assert problem in result.stderr
    assert result.stdout == ("well\n" if DELTA in answer else "")


def test_only_given_parameters_are_sent(failing: str) -> None:
    Failing.answer = DELTA + b"data: [DONE]\n\n"
    result = chat("--url", failing, "--api-key", "secret", "--seed", "3", "--top-k", "5")
    assert result.exit_code == 0, result.output
    expected = {"model", "stream", "stream_options", "messages", "seed", "top_k"}
    assert set(Failing.request_body) == expected
    assert Failing.request_body["model"] == "some-model"
    assert Failing.key == "Bearer secret"
    assert "1 token · first after" in result.stderr
    assert "prompt of" not in result.stderr  # this server reports no usage


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--url", "localhost:1"], "error: no server at http://localhost:1: "),
        (["--url", "gopher://localhost"], "error: --url: must look like"),
        (["--url", "localhost:1", "--api-key", "a\nb"], "error: --api-key: must be printable ASCII"),
        (["--url", "localhost:1", "--temperature", "-1"], "error: --temperature: "),
    ],
)
def test_a_bad_address_is_a_one_line_error(options: list[str], problem: str) -> None:
    result = chat(*options)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1

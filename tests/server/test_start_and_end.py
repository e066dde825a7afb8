"""What a person sees of a server: the start, a line per request, and the end."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from chairlift.cli.serve import ServerLife, banner
from chairlift.core.request import RequestLimits
from chairlift.progress import COMPILING, LOADING, StageDisplay, StartStage
from chairlift.server.access import KeySources
from chairlift.server.config import ServerConfig
from chairlift.server.http.boundary import SentResponse
from chairlift.server.http.request_log import RequestLog, _message_of
from chairlift.server.wire.messages import Loaded
from tests.server.front_end import NAME, answer_ok, front_end, stay_silent
from tests.server.running_server import HTTP, START_SECONDS, wait_for

SECRET = "the hidden prompt that is longer than a name"


def loaded(endpoint: str = "chat/completions") -> Loaded:
    limits = RequestLimits(vocab_size=320, max_model_len=256)
    return Loaded(limits, max_batch_requests=1, described="int8 on cpu", endpoint=endpoint)


# ---- the banner -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "embeddings"])
@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "https://0.0.0.0:80", "unix:/tmp/a socket"])
def test_the_banner_has_at_most_five_lines_and_its_curl_can_be_pasted(endpoint: str, address: str) -> None:
    lines = banner(ServerConfig("tiny", keys=KeySources(["s3cret"])), address, loaded(endpoint))
    assert len(lines) <= 5
    assert lines[0] == f"Serving tiny (int8 on cpu) at {address}"
    command = "\n".join(lines[[line.startswith("curl ") for line in lines].index(True) :])
    function = "curl() { printf '%s\\n' \"$@\"; }\n"
    environment = os.environ | {"CHAIRLIFT_API_KEY": "from-the-shell"}
    shell = subprocess.run(["bash", "-c", function + command], env=environment, capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    arguments = shell.stdout.splitlines()
    assert any(argument.endswith(f"/v1/{endpoint}") for argument in arguments)
    assert "Authorization: Bearer from-the-shell" in arguments
    assert "s3cret" not in "".join(lines)
    assert "0.0.0.0" not in command.replace("127.0.0.1", "")


# ---- lines about requests ---------------------------------------------------------------------------------------


class Lines:
    """A request log that keeps its lines."""

    def __init__(self, most: int = 20) -> None:
        self.found: list[str] = []
        self.log = RequestLog(most, lambda line, status: self.found.append(line))

    def wait_for(self, count: int) -> list[str]:
        wait_for(lambda: len(self.found) >= count, f"{count} lines, not {self.found}")
        return self.found


def test_a_request_is_a_line_without_its_texts() -> None:
    lines = Lines()
    with front_end(answer_ok, request_log=lines.log) as front:
        for max_tokens in (4, -1, SECRET):
            body = {"model": NAME, "prompt": SECRET, "max_tokens": max_tokens}
            HTTP.post(front.url + "/v1/completions", json=body)
        HTTP.get(front.url + "/health")
        HTTP.get(front.url + "/%1b[31m%0a/x?key=s3cret")
        answered, refused, quoting, missing = lines.wait_for(4)
    assert re.search(r"POST /v1/completions  200  in \d+  out \d+  TTFT ", answered)
    assert re.search(r"POST /v1/completions  400  .*max_tokens", refused)
    assert "  400  " in quoting
    assert re.search(r"GET /\\x1b\[31m\\n/x  404  ", missing)
    assert not re.search(f"{SECRET}|s3cret|/health|\x1b", "".join(lines.found))


QUOTED = [SECRET * 20, f"it's {SECRET * 20}", f"{SECRET[:3]}' {SECRET * 20}", [{"a": SECRET * 20}]]


@pytest.mark.parametrize("prompt", QUOTED)
def test_a_value_that_an_error_quotes_in_part_is_not_shown(prompt: Any) -> None:
    problem = f"doesn't fit the field 'n'; must be a list, got {prompt!r:.100}"
    shown = _message_of(json.dumps({"error": {"message": problem}}).encode())
    assert shown.startswith("doesn't fit the field 'n'; must be a list, got ")
    assert SECRET not in shown


@pytest.mark.parametrize(
    "problem",
    [
        "send the body as JSON, with the header Content-Type: application/json",
        "the model 'llama3.2' does not exist; this server has 'smollm2-135m'",
        "the model 'Qwen/Qwen3-30B-A3B-Instruct-2507' does not exist; this server has 'smollm2-135m'",
    ],
)
def test_the_names_in_an_error_are_shown(problem: str) -> None:
    assert _message_of(json.dumps({"error": problem}).encode()) == problem


def test_a_client_that_leaves_is_said() -> None:
    lines = Lines()
    with front_end(stay_silent, request_log=lines.log) as front:
        front.post_and_disconnect("/v1/completions", {"model": NAME, "prompt": "a"})
        (line,) = lines.wait_for(1)
    assert "499" in line or "the client left before the end" in line


def test_many_requests_are_summed_up() -> None:
    lines = Lines(2)

    async def ignore(message: Any) -> None: ...

    async def send() -> None:
        for status in (200, 200, 200, 200, 429):
            end = lines.log.begin({"method": "GET", "path": "/v1/models", "state": {}})
            sent = SentResponse(ignore)
            await sent.send({"type": "http.response.start", "status": status, "headers": []})
            await sent.send({"type": "http.response.body", "body": b""})
            end(sent)
        async with asyncio.timeout(60):
            while len(lines.found) < 3:
                await asyncio.sleep(0.05)

    asyncio.run(send())
    assert len(lines.found) == 3
    assert lines.found[-1].endswith(" … and 3 more: 2 × 200, 1 × 429; in 0, out 0 tokens")


def test_a_late_sum_leaves_the_next_second_its_lines() -> None:
    lines = Lines(2)
    for _ in range(2):
        lines.log.begin({"method": "GET", "path": "/v1/models", "state": {}})(SentResponse(None))  # type: ignore[arg-type]
        lines.log._sum_up()  # as the timer of the second before does
    assert not any("more" in line for line in lines.found)


# ---- progress and the end ---------------------------------------------------------------------------------------


def test_where_there_is_no_terminal_a_start_is_a_few_lines() -> None:
    said: list[str] = []
    display = StageDisplay(said.append)
    for name in (LOADING, COMPILING):
        for done in range(0, 101, 10):
            display(StartStage(name, done, 100))
    assert said == [COMPILING]


def test_the_end_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    life = ServerLife(ServerConfig("tiny"))
    for running in (3, 3, 2):
        life.draining(running)
    life.ended(0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "3 requests are running; waiting up to 30 s; Ctrl-C again stops at once"
    assert said[-1] == "Stopped; all requests are answered."
    life.ended(1)
    assert capsys.readouterr().err.strip() == "Stopped; 1 request is cut off."


class Terminal:
    """A command on a terminal of its own, and what it has shown."""

    def __init__(self, *command: str) -> None:
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "COLUMNS": "100"}
            os.execv(sys.executable, [sys.executable, "-m", "chairlift", *command])
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # The command has ended.
            while piece := os.read(self._terminal, 65536):
                self.text += piece.decode(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        wait_for(lambda: re.search(pattern, self.text), f"{pattern} in {self.text}", START_SECONDS)
        found = re.search(pattern, self.text)
        assert found is not None
        return found

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())


@pytest.fixture
def terminal(tiny_folder: Path) -> Iterator[Terminal]:
    options = ["--served-model-name", NAME, "--port", "0", "--kv-memory", "2MiB", "--device", "cpu"]
    shown = Terminal("serve", str(tiny_folder), *options)
    yield shown
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(shown.pid, signal.SIGKILL)
        os.waitpid(shown.pid, 0)


def test_a_server_on_a_terminal(terminal: Terminal) -> None:
    url = terminal.wait_for(rf"Serving {NAME} \(float32 on cpu\) at (\S+)\r\n")[1]
    terminal.wait_for("Dashboard: ")
    terminal.wait_for("curl ")
    HTTP.post(f"{url}/v1/completions", json={"model": NAME, "prompt": "a", "max_tokens": 3, "ignore_eos": True})
    terminal.wait_for(r"POST /v1/completions  200  in \d+  out 3  TTFT ")
    assert "KV cache" not in terminal.text  # Details need --verbose.
    terminal.type("\x03")
    terminal.wait_for(r"Stopped\.")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 0
    assert "Traceback" not in terminal.text

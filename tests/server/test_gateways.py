"""nginx and SGLang's gateway in front of two servers, as docs/gateways.md describes them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.running_server import HTTP, NAME, RunningServer, start_server, wait_for
from tests.tiny import write_tiny_checkpoint
from tests.tools import require_tool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy" / "nginx" / "chairlift.conf"
PAGE = ROOT / "docs" / "gateways.md"


@dataclass
class Gateway:
    url: str
    servers: list[RunningServer]
    reads_prompts: bool  # otherwise requests name their session

    def client(self, session: str = "") -> openai.OpenAI:
        headers = {"X-Session-Id": session} if session and not self.reads_prompts else {}
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, default_headers=headers
        )

    def total(self, metric: str, **labels: str) -> float:
        return sum(server.metric_of(metric, **labels) for server in self.servers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("gateways") / "tiny", positions=4096)


def start_servers(stack: ExitStack, model: Path) -> list[RunningServer]:
    servers = []
    for index in range(2):
        options = ["--max-batch-requests", "2", "--max-waiting", "1"]
        server = start_server(model, model.parent / f"server-{index}.log", *options)
        stack.callback(stop, server)
        servers.append(server)
    for server in servers:
        server.wait_until("/ready", 200)
    return servers


def stop(server: RunningServer) -> None:
    if server.process.poll() is None:
        server.stop()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_gateway(stack: ExitStack, command: list[str], url: str, log: Path) -> None:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(httpx.TransportError):
            body = {"model": NAME, "prompt": "hi", "max_tokens": 1}
            return HTTP.post(f"{url}/v1/completions", json=body).status_code == 200
        return False

    wait_for(is_ready, f"the gateway\n{log.read_text()}")


def nginx_options(servers: list[RunningServer], port: int, folder: Path) -> list[str]:
    """The options for the configuration in deploy/, with other addresses."""
    own = CONFIG.read_text().replace("listen 8000;", f"listen 127.0.0.1:{port};")
    for number, server in zip((8001, 8002), servers, strict=True):
        own = own.replace(f"server 127.0.0.1:{number} ", f"server {server.url.removeprefix('http://')} ")
    assert "127.0.0.1:800" not in own
    paths = "".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {paths} {own} }}"
    (folder / "nginx.conf").write_text(main)
    user = ["-g", "user root;"] if os.getuid() == 0 else []
    return ["-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf"), *user]


def smg_options(servers: list[RunningServer], port: int) -> list[str]:
    """The options on the page, with other addresses."""
    found = re.search(r"^smg (launch .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    words = found[1].replace("\\\n", " ").split()
    for number, server in zip((8001, 8002), servers, strict=True):
        words[words.index(f"http://127.0.0.1:{number}")] = server.url
    words[words.index("8000")] = str(port)
    return [*words, "--host", "127.0.0.1", "--prometheus-port", str(free_port())]


@pytest.fixture(scope="module", params=["nginx", "smg"])
def gateway(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp(request.param)
    port = free_port()
    with ExitStack() as stack:
        program = _program(request.param)
        servers = start_servers(stack, model)
        options = nginx_options(servers, port, folder) if request.param == "nginx" else smg_options(servers, port)
        start_gateway(stack, [program, *options], f"http://127.0.0.1:{port}", folder / "log")
        yield Gateway(f"http://127.0.0.1:{port}", servers, reads_prompts=request.param == "smg")


def _program(name: str) -> str:
    return os.environ.get(f"CHAIRLIFT_{name.upper()}") or require_tool(name, f"/usr/sbin/{name}")


def test_responses_are_those_of_the_servers(gateway: Gateway) -> None:
    whole = gateway.client().completions.create(model=NAME, prompt="the lift", max_tokens=8, temperature=0)
    pieces = gateway.client().completions.create(
        model=NAME, prompt="the lift", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    chat = gateway.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hello"}], max_tokens=3
    )
    assert chat.choices[0].message.content is not None
    with pytest.raises(openai.BadRequestError) as error:
        gateway.client().completions.create(model=NAME, prompt="hi", temperature=-1)
    assert error.value.param == "temperature"
    assert [one.id for one in gateway.client().models.list().data] == [NAME]


def test_a_stream_arrives_in_pieces_and_ends_when_the_client_leaves(gateway: Gateway) -> None:
    before = gateway.total("chairlift_requests_total", reason="cancelled")
    with gateway.client().completions.create(
        model=NAME, prompt="the lift", max_tokens=3500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices[0].finish_reason is None  # while the others are still computed
    wait_for(lambda: gateway.total("chairlift_requests_total", reason="cancelled") == before + 1, "the cancellation")
    for server in gateway.servers:
        server.wait_idle()


def test_requests_of_a_session_go_to_the_server_that_has_their_prefix(gateway: Gateway) -> None:
    def cached() -> list[tuple[float, float]]:
        names = ("chairlift_prompt_tokens_total", "chairlift_prompt_tokens_cached_total")
        return [(server.metric(names[0]), server.metric(names[1])) for server in gateway.servers]

    before = cached()
    for turn in range(4):
        for group in range(8):
            prompt = f"session {group} " * 40 + f"turn {turn}"
            gateway.client(f"session-{group}").completions.create(model=NAME, prompt=prompt, max_tokens=1)
    gained = [(now[0] - was[0], now[1] - was[1]) for now, was in zip(cached(), before, strict=True)]
    assert all(prompt > 0 for prompt, _ in gained), "one server has all sessions"
    share = sum(cached for _, cached in gained) / sum(prompt for prompt, _ in gained)
    print(f"{share:.2f} of the prompt tokens were cached")
    assert share > 0.6  # three of four turns, less the last blocks


def test_a_full_fleet_answers_429(gateway: Gateway) -> None:
    """Each server takes 2 + 1 requests, so that at least one of 9 finds no room."""

    def ask(index: int) -> int:
        body = {"model": NAME, "prompt": f"{index}", "max_tokens": 1500, "ignore_eos": True}
        response = httpx.post(
            f"{gateway.url}/v1/completions", json=body, headers={"X-Session-Id": str(index)}, timeout=120
        )
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
        return response.status_code

    start = threading.Barrier(9)
    with ThreadPoolExecutor(9) as pool:
        statuses = list(pool.map(lambda index: (start.wait(), ask(index))[1], range(9)))
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4


def test_requests_go_elsewhere_when_a_server_is_gone(gateway: Gateway) -> None:
    gateway.servers[0].stop(signal.SIGTERM)
    for index in range(6):
        answer = gateway.client(str(index)).completions.create(model=NAME, prompt="the lift", max_tokens=2)
        assert answer.choices[0].text is not None

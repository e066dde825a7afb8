"""Where and how the server listens: Unix sockets, TLS, several model names, another chat template, the access log."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.loading.request_defaults import read_chat_template
from chairlift.server.config import ServerConfig, server_config
from chairlift.server.http.listener import Certificate, UvicornServer, listen
from chairlift.server.lifecycle import serve_forever
from chairlift.server.options import ServerOptions
from chairlift.server.wire.limits import Limits
from chairlift_lab.load.trace_files import load_trace
from tests.server.front_end import NAME, answer_ok, front_end, stay_silent
from tests.server.running_server import HTTP, RunningServer, start_server, wait_for
from tests.tools import require_tool

SECRET = "the-secret-words-of-a-prompt"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, "first")
    return Certificate(folder / "cert.pem", folder / "key.pem")


def make_certificate(folder: Path, name: str) -> None:
    openssl = require_tool("openssl")
    command = (
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key.pem -out cert.pem"
    )
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *subject], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def secure(
    certificate: Certificate, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server with TLS, a second model name, its own chat template and an access log."""
    folder = tmp_path_factory.mktemp("secure")
    (folder / "chat.jinja").write_text(
        "{% for message in messages %}[{{ message.content }}]{% endfor %}{# <think></think> #}"
    )
    options = [
        "--served-model-name",
        "tiny",
        "--served-model-name",
        "gpt-4o-mini",
        "--chat-template",
        str(folder / "chat.jinja"),
    ]
    options += ["--ssl-certfile", str(certificate.certfile), "--ssl-keyfile", str(certificate.keyfile)]
    running = start_server(tiny_folder, folder / "log", *options, "--access-log", str(folder / "access.jsonl"))
    yield running
    assert running.stop() == 0, running.tail()


def access_lines(file: Path, count: int) -> list[dict[str, Any]]:
    wait_for(lambda: file.exists() and file.read_text().count("\n") >= count, "the lines of the access log")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_https_with_the_official_client(secure: RunningServer, certificate: Certificate) -> None:
    assert secure.url.startswith("https://")
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(certificate.certfile)))
    client = secure.client(http_client=trusting)
    stream = client.completions.create(model="tiny", prompt="hello", max_tokens=3, stream=True)
    assert sum(bool(chunk.choices) for chunk in stream) >= 1
    with pytest.raises(openai.APIConnectionError):  # the certificate is not signed by a known authority
        secure.client(http_client=httpx.Client(verify=True)).models.list()
    with pytest.raises(httpx.TransportError):
        HTTP.get(secure.url.replace("https", "http") + "/health")


def test_reasoning_is_detected_from_the_given_template(secure: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "so <think>", "max_tokens": 12, "thinking_token_budget": 0, "temperature": 0}
    answer = secure.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith("</think>")


def test_every_served_name_is_accepted_and_listed(secure: RunningServer) -> None:
    listed = secure.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "gpt-4o-mini"]
    assert secure.get("/v1/models/gpt-4o-mini").json()["id"] == "gpt-4o-mini"
    for name in ("tiny", "gpt-4o-mini"):
        answer = secure.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    unknown = secure.post("/v1/completions", {"model": "gpt-5", "prompt": "a"})
    assert unknown.status_code == 404
    assert "'tiny', 'gpt-4o-mini'" in unknown.json()["error"]["message"]


def test_a_given_chat_template_replaces_the_models_own(secure: RunningServer) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    as_chat, as_text = (secure.post("/tokenize", body).json()["tokens"] for body in (chat, {"prompt": "[hello]"}))
    assert as_chat == as_text


def test_the_access_log_has_one_line_per_request_and_no_prompt(secure: RunningServer) -> None:
    file = secure.log.parent / "access.jsonl"
    before = len(file.read_text().splitlines()) if file.exists() else 0
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 4, "ignore_eos": True}
    answer = secure.post("/v1/completions", body)
    streamed = secure.post("/v1/completions?key=hidden", body | {"stream": True})
    secure.post("/v1/completions", body | {"n": 0})
    sent, stream, refused = access_lines(file, before + 3)[before:]
    assert sent["request_id"] == answer.headers["x-request-id"]
    assert stream["request_id"] == streamed.headers["x-request-id"]
    usage = answer.json()["usage"]
    for line in (sent, stream):
        assert (line["method"], line["path"], line["status"], line["complete"]) == (
            "POST",
            "/v1/completions",
            200,
            True,
        )
        assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 4)
        assert line["client"] == "127.0.0.1"
        assert isinstance(line["seconds"], float)
    assert refused["status"] == 400
    assert "prompt_tokens" not in refused
    assert SECRET not in file.read_text()
    assert "hidden" not in file.read_text()


def test_a_moved_access_log_is_opened_anew_and_disconnects_are_visible(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    with front_end(stay_silent, limits=Limits(), access_log=file) as front:
        front.post_and_disconnect("/v1/completions", {"model": NAME, "prompt": "a"})
        (line,) = access_lines(file, 1)
        assert line["complete"] is False or line["status"] == 499
        file.rename(tmp_path / "access.jsonl.1")
        HTTP.get(front.url + "/health")
        (line,) = access_lines(file, 1)
        assert (line["path"], line["status"]) == ("/health", 200)


def test_the_access_log_names_the_tenant(tmp_path: Path) -> None:
    with front_end(answer_ok, access_log=tmp_path / "log", api_keys=["alice s3cret"]) as front:
        HTTP.get(front.url + "/v1/models", headers={"authorization": "Bearer s3cret"})
        HTTP.get(front.url + "/v1/models", headers={"authorization": "Bearer wrong"})
    lines = access_lines(tmp_path / "log", 2)
    assert [(line["tenant"], line["status"]) for line in lines] == [("alice", 200), (None, 401)]
    assert "s3cret" not in (tmp_path / "log").read_text()


def test_the_access_log_has_what_a_simulation_needs(tmp_path: Path) -> None:
    """Equal beginnings have equal hashes, unless the servers or the salts of the requests differ."""
    prompts = [list(range(10, 50)), [*range(10, 42), *[7] * 10]]

    def send(file: Path, salt: str) -> list[dict[str, Any]]:
        with front_end(answer_ok, access_log=file, access_log_salt=salt) as front:
            body = {"model": NAME, "prompt": prompts, "max_tokens": 2, "targets": {"ttft_ms": 500}}
            HTTP.post(front.url + "/v1/completions", json=body)
            HTTP.post(front.url + "/v1/completions", json={"model": NAME, "prompt": prompts[0], "cache_salt": "mine"})
            return access_lines(file, 2)

    both, salted = send(tmp_path / "one.jsonl", "a")
    entries = load_trace(tmp_path / "one.jsonl", "log")
    assert [(entry.n_in, entry.n_out, str(entry.targets)) for entry in entries] == [
        (40, 2, "ttft:500"),
        (42, 2, "ttft:500"),
        (40, 2, ""),
    ]
    assert entries[0].blocks == entries[1].blocks != entries[2].blocks
    assert all(entry.measured for entry in entries)
    first, second = (prompt["blocks"] for prompt in both["prompts"])
    assert [prompt["tokens"] for prompt in both["prompts"]] == [40, 42]
    assert first == second
    assert len(set(first)) == 2
    assert [each["prompt"] for each in both["completions"]] == [0, 1]
    for each in both["completions"]:
        assert (each["tokens"], each["cached"], each["finish_reason"]) == (2, 0, "length")
        assert 0 <= each["ttft_ms"] <= each["e2e_ms"]
    assert (both["targets"], both["priority"], salted["targets"]) == ({"ttft_ms": 500.0}, 0, None)
    assert not set(salted["prompts"][0]["blocks"]) & set(first)
    again, other = send(tmp_path / "same", "a")[0], send(tmp_path / "other", "b")[0]
    assert again["prompts"] == both["prompts"]
    assert not set(other["prompts"][0]["blocks"]) & set(first)


def test_the_salt_of_the_access_log_is_drawn_and_needs_a_log(tmp_path: Path) -> None:
    drawn = {server_config(ServerOptions(access_log=tmp_path / "log"), "m", {}).access_log_salt for _ in range(2)}
    assert len(drawn) == 2
    options = ServerOptions(access_log=tmp_path / "log", access_log_salt="ours")
    assert server_config(options, "m", {}).access_log_salt == "ours"
    with pytest.raises(InvalidParameter, match="access_log_salt: goes with --access-log"):
        server_config(ServerOptions(access_log_salt="ours"), "m", {})


def test_a_log_that_cannot_be_written_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    config = ServerConfig("no-such-model", access_log=tmp_path / "missing" / "log")
    with pytest.raises(InvalidParameter, match="access_log: cannot write"):
        asyncio.run(serve_forever(config))


def test_a_full_disk_for_the_access_log_is_said_in_a_line(caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    with front_end(access_log=Path("/dev/full")) as front:
        assert HTTP.get(front.url + "/health").status_code == 200
        wait_for(lambda: "cannot write the access log" in caplog.text, "the line")
    assert "Traceback" not in capfd.readouterr().err


def test_an_application_that_cannot_start_ends_the_server() -> None:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        raise OSError("no disk")
        yield

    async def run() -> None:
        with listen("127.0.0.1", 0) as listener:
            await UvicornServer(Starlette(lifespan=lifespan), Limits()).serve(sockets=[listener])

    with pytest.raises(ChairliftError, match="cannot start"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "port", "parameter"), [("256.1.1.1", 0, "host"), ("192.0.2.1", 0, "host"), ("127.0.0.1", None, "port")]
)
def test_an_address_that_cannot_be_used_names_its_option(host: str, port: int | None, parameter: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidParameter) as refused:
        listen(host, taken.getsockname()[1] if port is None else port)
    assert refused.value.parameter == parameter


def test_a_unix_socket_serves_http_and_is_removed_at_the_end(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chairlift.sock"
    abandoned = listen("", 0, path)
    abandoned.close()
    assert path.exists()
    running = start_server(tiny_folder, tmp_path / "log", "--uds", str(path), "--log-level", "error")
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
        with pytest.raises(InvalidParameter, match="uds: cannot listen"):
            listen("", 0, path)
        assert "KV" not in running.log.read_text()  # the engine's startup details are of level info
    finally:
        assert running.stop() == 0, running.tail()
    assert not path.exists()


def test_a_file_is_never_replaced_by_a_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InvalidParameter, match="uds"):
        listen("", 0, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_certificates_and_templates_are_checked_before_anything_is_loaded(
    tmp_path: Path, certificate: Certificate
) -> None:
    text = tmp_path / "text"
    text.write_text("{% if %}")
    with pytest.raises(InvalidParameter, match="ssl_certfile: there is no file"):
        Certificate(tmp_path / "none").check()
    with pytest.raises(InvalidParameter, match="ssl_keyfile: there is no file"):
        Certificate(certificate.certfile, tmp_path / "none").check()
    for wrong in (Certificate(text), Certificate(certificate.certfile), Certificate(certificate.certfile, text)):
        with pytest.raises(InvalidParameter, match="ssl_certfile: no certificate and matching"):
            wrong.check()
    for file in (text, tmp_path / "none"):
        with pytest.raises(InvalidParameter, match=r"chat_template: cannot (use|read)"):
            read_chat_template(file)


def test_tokens_do_not_wait_for_acknowledgements() -> None:
    """On Linux and BSD a connection has the options of its listener; asyncio would not set this one."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

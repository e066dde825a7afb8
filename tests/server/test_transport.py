"""Clients that send slow or malformed HTTP to the real front end."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift.server.openai.response_builder import CompletionResponseBuilder
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Cancel, Submit, ToEngine, Update
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, front_end, stay_silent
from tests.server.running_server import HTTP, wait_for
from tests.tiny import CHATML, byte_level_tokenizer

TEXT = "/v1/completions"
BODY = json.dumps({"model": NAME, "prompt": "hello"}).encode()
SHORT_TIMEOUTS = Limits(header_seconds=1.0, body_seconds=1.0, linger_seconds=1.0, stall_seconds=1.0)


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture(scope="module")
def short_timeouts() -> Iterator[FrontEnd]:
    with front_end(limits=SHORT_TIMEOUTS) as running:
        yield running


def post(body: bytes = BODY, *, length: int | None = None, more: str = "") -> bytes:
    size = len(body) if length is None else length
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
    return f"{head}{more}\r\n".encode() + body


def reply(connection: socket.socket) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response


def expect_error(connection: socket.socket, status: int, code: str | None = None) -> None:
    response = reply(connection)
    assert response.status == status
    assert response.headers["x-request-id"]
    error = json.loads(response.read())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code


def read_to_end(connection: socket.socket) -> bytes:
    """All data until the server closes the connection."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def statuses(found: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", found)]


def expect_healthy(front: FrontEnd) -> None:
    answer = HTTP.post(front.url + TEXT, content=BODY, headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == "ok"


def test_endless_headers_are_dropped_and_block_no_others(short_timeouts: FrontEnd) -> None:
    slow = [short_timeouts.connect() for _ in range(20)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
    expect_healthy(short_timeouts)
    for connection in slow:
        connection.sendall(b"x-more: 1\r\n")  # further data does not extend the limit
        expect_error(connection, 408, "timeout")
        assert read_to_end(connection) == b""
        connection.close()


def test_a_silent_connection_is_closed(short_timeouts: FrontEnd) -> None:
    with short_timeouts.connect() as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("sent", [b"", BODY[:-1]], ids=["nothing", "all but a byte"])
def test_an_endless_body_is_dropped(short_timeouts: FrontEnd, sent: bytes) -> None:
    with short_timeouts.connect() as connection:
        connection.sendall(post(sent, length=len(BODY)))
        expect_healthy(short_timeouts)
        expect_error(connection, 408, "timeout")
        assert read_to_end(connection) == b""


def test_an_endless_body_after_the_response_is_dropped(short_timeouts: FrontEnd) -> None:
    with short_timeouts.connect() as connection:
        connection.sendall(post(b"", length=2**30))
        expect_error(connection, 413, "body_too_large")

        def is_closed() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            return False

        wait_for(is_closed, "the connection to be closed")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 41943040", 413),
        (f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 41943040\r\nconnection: close", 413),
        (f"POST {TEXT} HTTP/1.0\r\nhost: localhost\r\ncontent-length: 41943040", 413),
        (f"POST {TEXT} HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 41943040\r\nconnection: close", 403),
        (f"POST {TEXT} HTTP/1.1\r\nno colon", 400),
    ],
    ids=["keep-alive", "close", "HTTP/1.0", "another refusal", "malformed"],
)
def test_an_early_refusal_reaches_a_client_that_sends_all_of_a_large_body_first(
    front: FrontEnd, head: str, status: int
) -> None:
    with front.connect() as connection:
        connection.sendall(f"{head}\r\ncontent-type: application/json\r\n\r\n".encode())
        for _ in range(40):
            connection.sendall(b" " * 2**20)
        expect_error(connection, status)
    expect_healthy(front)


def test_a_refused_client_that_goes_on_sending_is_disconnected(short_timeouts: FrontEnd) -> None:
    with short_timeouts.connect() as connection:
        connection.sendall(post(b"", length=2**40, more="connection: close\r\n"))
        expect_error(connection, 413, "body_too_large")

        def is_closed() -> bool:
            try:
                connection.sendall(b"x" * 1000)
            except OSError:
                return True
            return False

        wait_for(is_closed, "the connection to be closed")


def test_a_client_that_reads_a_large_response_too_slowly_is_disconnected() -> None:
    size = 64 * 2**20

    def answer(engine: ScriptedEngine, message: ToEngine) -> None:
        if isinstance(message, Submit):
            engine.publish(Update(message.request_id, text="x" * size, tokens=[5], finish_reason="length"))

    with front_end(answer, limits=SHORT_TIMEOUTS) as front:
        with front.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)  # or the system would hold half of it
            connection.sendall(post())
            num_read = 0
            while num_read < size and (data := connection.recv(2**18)):
                num_read += len(data)
                time.sleep(0.1)
            assert num_read < size // 2
        with front.connect() as connection:
            connection.sendall(post())
            assert len(reply(connection).read()) > size


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("transfer-encoding: chunked\r\n", 400),
        ("authorization: Bearer a\r\nauthorization: Bearer b\r\n", 400),
        ("expect: 200-ok\r\n", 417),
        ("expect: 100-continue\r\nexpect: more\r\n", 417),
    ],
)
def test_ambiguous_requests_are_refused_and_their_connection_closed(front: FrontEnd, more: str, status: int) -> None:
    with front.connect() as connection:
        connection.sendall(post(b"0\r\n\r\n" + post(), length=4, more=more))
        found = read_to_end(connection)
        assert statuses(found) == [status]
        assert b'"bad_http"' in found
    with front.connect() as connection:
        connection.sendall(post(b"", length=len(BODY), more="expect: 100-Continue\r\n"))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert reply(connection).status == 200


def test_public_metrics_need_no_key_and_no_known_host() -> None:
    for options, expected in (
        ({"api_keys": ["secret"]}, 401),
        ({}, 403),
        ({"api_keys": ["secret"], "public_metrics": True}, 200),
        ({"public_metrics": True}, 200),
    ):
        with front_end(**options) as front:
            assert HTTP.get(front.url + "/metrics", headers={"Host": "prometheus"}).status_code == expected
            for path in ("/health", "/ready"):
                assert HTTP.get(front.url + path, headers={"Host": "prometheus"}).status_code == 200
            assert HTTP.get(front.url + "/version", headers={"Host": "prometheus"}).status_code in (401, 403)


def test_a_content_length_that_is_too_short(front: FrontEnd) -> None:
    with front.connect() as connection:
        connection.sendall(post(BODY + b"\x00\x01\r\n\r\n", length=len(BODY)))
        assert statuses(read_to_end(connection)) == [200, 400]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no host
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n",
    ],
    ids=range(8),
)
def test_malformed_http_is_refused(front: FrontEnd, sent: bytes) -> None:
    with front.connect() as connection:
        connection.sendall(sent if b"\r\n" in sent else sent + b"\r\n\r\n")
        expect_error(connection, 400, "bad_http")
        assert read_to_end(connection) == b""
    expect_healthy(front)


@pytest.mark.parametrize("headers", ["x: y\r\n" * 130, "x: " + "y" * 31_000 + "\r\ny: " + "z" * 2_000 + "\r\n"])
def test_too_many_headers_are_refused(front: FrontEnd, headers: str) -> None:
    with front.connect() as connection:
        connection.sendall(post(more=headers))
        expect_error(connection, 431, "headers_too_large")


def test_pipelined_requests_on_one_connection(front: FrontEnd) -> None:
    with front.connect() as connection:
        for _ in range(3):
            connection.sendall(post())
            assert json.loads(reply(connection).read())["choices"][0]["text"] == "ok"
        # Without waiting for the responses.
        connection.sendall(post() + post(b"{") + post(more="connection: close\r\n"))
        assert statuses(read_to_end(connection)) == [200, 400, 200]


def test_a_disconnect_behind_a_pipelined_request_is_detected() -> None:
    with front_end(stay_silent) as front:
        connection = front.connect()
        connection.sendall(post() + post())
        wait_for(lambda: front.engine.num_open == 1, "the request to reach the engine")
        connection.close()
        wait_for(
            lambda: any(isinstance(message, Cancel) for message in front.engine.received),
            "the request to be cancelled",
        )
        assert front.metric("requests_total", reason="cancelled") == 1


def test_head_and_wrong_methods(front: FrontEnd) -> None:
    for method, path in (("GET", TEXT), ("BREW", TEXT), ("DELETE", "/health"), ("OPTIONS", TEXT), ("PUT", "/metrics")):
        refused = HTTP.request(method, front.url + path)
        assert refused.status_code == 405
        assert refused.headers["allow"] in ("GET", "POST")
        assert refused.headers["x-request-id"]
        assert refused.json()["error"]["type"] == "invalid_request_error"
    for path in ("/health", "/ready", "/v1/models", "/metrics"):
        head = HTTP.head(front.url + path)
        assert head.status_code == 200
        assert head.content == b""
        assert int(head.headers["content-length"]) > 0
    assert HTTP.head(front.url + "/nothing").status_code == 404


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_only_json_bodies_are_accepted(front: FrontEnd, kind: str | None) -> None:
    """Browsers send forms to other origins without a preflight request, but not JSON."""
    for path in (TEXT, "/v1/chat/completions", "/tokenize"):
        refused = HTTP.post(front.url + path, content=BODY, headers={"Content-Type": kind} if kind else {})
        assert refused.status_code == 415
        assert "application/json" in refused.json()["error"]["message"]
    taken = HTTP.post(front.url + TEXT, content=BODY, headers={"Content-Type": "application/json; charset=utf-8"})
    assert taken.status_code == 200


def test_cors_origins() -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with front_end() as front:
        assert "access-control-allow-origin" not in HTTP.get(front.url + "/health", headers=headers).headers
    with front_end(cors_origins=["https://a.example"], api_keys=["secret"]) as front:
        preflight = HTTP.options(front.url + TEXT, headers=headers)  # a preflight request has no key
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert preflight.headers["x-request-id"]
        refused = HTTP.post(front.url + TEXT, content=BODY, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        strange = headers | {"Origin": "https://b.example"}
        for path in (TEXT, "/v1/messages"):
            assert HTTP.options(front.url + path, headers=strange).status_code == 400
        other = HTTP.post(front.url + TEXT, content=BODY, headers=strange)
        assert "access-control-allow-origin" not in other.headers


def write_a_lot(engine: ScriptedEngine, message: ToEngine) -> None:
    if isinstance(message, Submit):
        for _ in range(64):
            engine.publish(Update(message.request_id, text="x" * 2**18, tokens=[5]))


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    with front_end(write_a_lot, limits=SHORT_TIMEOUTS) as front, front.connect() as connection:
        connection.sendall(post(json.dumps({"model": NAME, "prompt": "hello", "stream": True}).encode()))
        wait_for(
            lambda: any(isinstance(message, Cancel) for message in front.engine.received),
            "the request to be cancelled",
        )
        assert front.engine.num_open == 0
        assert statuses(read_to_end(connection)) == [200]


def test_too_many_large_bodies_at_once_are_refused() -> None:
    with front_end(stay_silent, limits=Limits(max_held_bytes=1000)) as front:
        large = json.dumps({"model": NAME, "prompt": "hello", "stop": "x" * 600}).encode()
        with front.connect() as first, front.connect() as second:
            first.sendall(post(large))
            wait_for(lambda: front.engine.num_open == 1, "the first request to be admitted")
            second.sendall(post(large))
            expect_error(second, 429, "queue_full")
        wait_for(lambda: front.engine.num_open == 0, "the first request to be cancelled")
        with front.connect() as third:
            third.sendall(post(large))
            wait_for(lambda: front.engine.num_open == 1, "the next request to be admitted")


def test_an_internal_error_has_an_id_and_reveals_nothing_of_the_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str, **_: Any) -> None:
        raise RuntimeError(f"cannot tokenize {text}")

    with front_end() as front:
        monkeypatch.setattr(front.service.model.tokenizer, "encode", fail)
        answer = HTTP.post(front.url + TEXT, json={"model": NAME, "prompt": "my secret prompt"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-request-id"] in caplog.text
        assert "RuntimeError" in caplog.text
        assert "secret" not in caplog.text + answer.text


def test_an_internal_error_in_a_stream_is_logged_and_ends_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "my secret prompt"

    def fail(self: CompletionResponseBuilder) -> list[bytes]:
        raise RuntimeError(prompt)

    monkeypatch.setattr(CompletionResponseBuilder, "end_events", fail)
    with front_end() as front:
        answer = HTTP.post(front.url + TEXT, json={"model": NAME, "prompt": prompt, "stream": True})
    assert answer.text.count('{"error":') == answer.text.count("[DONE]") == 1
    assert f"RuntimeError in the request {answer.headers['x-request-id']}" in caplog.text
    assert "secret" not in caplog.text + answer.text


def test_a_stream_whose_output_is_not_shown_sends_pings() -> None:
    thinking = Tokenizer(byte_level_tokenizer(), chat_template=CHATML + "{# <think> </think> #}")
    with front_end(stay_silent, limits=Limits(ping_seconds=0.05), tokenizer=thinking) as front:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": NAME, "messages": messages, "stream": True, "include_reasoning": False}
        with HTTP.stream("POST", front.url + "/v1/chat/completions", json=body, timeout=30) as answer:
            (submitted,) = front.engine.received
            assert isinstance(submitted, Submit)
            for index in range(100):
                text = "well, " if index else "<think>"
                front.engine.publish(Update(submitted.request_id, text=text, tokens=[5]), after=0.01 * index)
            end = Update(submitted.request_id, text="</think>ok", tokens=[5], finish_reason="stop")
            front.engine.publish(end, after=1.0)
            lines = [line for line in answer.iter_lines() if line]
    role = next(index for index, line in enumerate(lines) if '"role"' in line)
    assert lines[role + 1] == ": waiting"
    assert '"content":"ok"' in lines[-3] + lines[-2]
    assert "well" not in "".join(lines)


def test_a_stream_without_output_sends_pings() -> None:
    with front_end(stay_silent, limits=Limits(ping_seconds=0.05)) as front:
        body = {"model": NAME, "prompt": "hello", "stream": True}
        with HTTP.stream("POST", front.url + TEXT, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": waiting"
            (submitted,) = front.engine.received
            assert isinstance(submitted, Submit)
            front.engine.publish(Update(submitted.request_id, text="ok", tokens=[5], finish_reason="stop"))
            events = [line for line in lines if line.startswith("data: ")]
        assert json.loads(events[0][6:])["choices"][0]["text"] == "ok"
        assert events[-1] == "data: [DONE]"

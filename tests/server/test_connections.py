"""Limits on connections: idle ones are closed for new ones, and file descriptors never run out."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chairlift.errors import InvalidParameter
from chairlift.machine.files import connection_limit, file_limit
from chairlift.server.http.connections import (
    Acceptor,
    Connection,
    ConnectionPhase,
    Connections,
    _host,
)
from chairlift.server.http.listener import Certificate, LogLimit
from chairlift.server.wire.limits import Limits
from tests.server.front_end import NAME, FrontEnd, front_end, stay_silent
from tests.server.running_server import wait_for
from tests.server.test_listening import make_certificate

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
FEW_FILES = 64
SERVER = """
import asyncio, socket
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from chairlift.server.http.listener import UvicornServer
from chairlift.server.http.listener import Certificate
from chairlift.server.http.listener import LogLimit
from chairlift.server.wire.limits import Limits
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = Starlette(routes=[Route("/health", lambda request: PlainTextResponse("ok"))])
asyncio.run(UvicornServer(app, Limits()).serve(sockets=[listener]))
"""


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def status(connection: socket.socket, sent: bytes = HEALTH) -> int:
    """Send a request and return the status of the response, which is read to its end."""
    connection.sendall(sent)
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(1)
    length = re.search(rb"content-length: (\d+)", found)
    assert length is not None
    remaining = int(length[1])
    while remaining and (data := connection.recv(remaining)):
        remaining -= len(data)
    return int(found.split()[1])


def completion(length: int, sent: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode() + sent


def test_health_answers_when_idle_strangers_take_all_file_descriptors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    limits = FEW_FILES, FEW_FILES
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=Path(__file__).parents[2],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
            text=True,
        )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(FEW_FILES - 6)]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            assert status(client) == 200
    assert sum(map(is_closed, strangers)) >= FEW_FILES // 2  # and others still have theirs
    assert not is_closed(strangers[-1])
    for stranger in strangers:
        stranger.close()
    server.kill()
    server.communicate()
    assert "Traceback" not in log.read_text()
    assert len(log.read_text().splitlines()) < 25


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end(stay_silent, limits=Limits(max_connections=8)) as running:
        yield running


def test_the_oldest_idle_connection_is_closed_and_those_with_a_request_stay(front: FrontEnd) -> None:
    busy = front.connect()
    body = b'{"model": "%s", "prompt": "hello"}' % NAME.encode()
    busy.sendall(completion(len(body), body))
    wait_for(lambda: front.engine.num_open == 1, "the request")
    idle = [front.connect() for _ in range(5)]  # with the busy one, all that one address may have
    assert [status(one) for one in idle] == [200] * 5
    assert status(idle[0]) == 200  # now the second one is idle for longest
    with front.connect() as another:
        assert status(another) == 200
    wait_for(lambda: is_closed(idle[1]), "the oldest idle connection to be closed")
    assert [is_closed(one) for one in (busy, *idle)] == [False, False, True, False, False, False]


def test_a_request_that_never_arrives_is_closed_for_others_and_busy_ones_refuse_more(front: FrontEnd) -> None:
    slow = [front.connect() for _ in range(6)]
    for one in slow:
        one.sendall(completion(100, b"{"))
    body = b'{"model": "%s", "prompt": "hello"}' % NAME.encode()
    busy = []
    for count in range(1, 7):
        busy.append(front.connect())
        busy[-1].sendall(completion(len(body), body))
        wait_for(lambda count=count: front.engine.num_open == count, "the request")  # type: ignore[misc]
    for one in slow:
        wait_for(lambda one=one: is_closed(one), "it to be closed")  # type: ignore[misc]
    with front.connect() as refused:
        assert status(refused) == 503
    assert not any(map(is_closed, busy))


def test_strangers_that_read_no_responses_are_closed_for_others() -> None:
    """The page of the dashboard needs no key."""
    sent = b"GET /dashboard HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200
    with front_end(limits=Limits(max_connections=8), api_keys=["secret"]) as front, ExitStack() as strangers:
        for _ in range(6):
            stranger = strangers.enter_context(front.connect())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            stranger.sendall(sent)
        time.sleep(1)  # until no buffer has room
        for _ in range(3):
            with front.connect() as client:
                assert status(client) == 200


def test_clients_that_begin_no_tls_are_closed_for_others(tmp_path: Path) -> None:
    make_certificate(tmp_path, "server")
    certificate = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    with front_end(limits=Limits(max_connections=8), certificate=certificate) as front:
        silent = [front.connect() for _ in range(20)]
        with ssl._create_unverified_context().wrap_socket(front.connect()) as client:
            assert status(client) == 200
            assert sum(map(is_closed, silent)) >= 15
        for one in silent:
            one.close()


def test_one_address_cannot_take_all_connections() -> None:
    connections = Connections(8)
    closed: list[str] = []

    def add(address: str) -> Connection | None:
        connection = connections.add(address)
        if connection is not None:
            connection.abort = lambda: closed.append(address)
            connection.enter(ConnectionPhase.IDLE)
        return connection

    for _ in range(10):
        add("attacker")
    assert (connections._all.size, closed) == (6, ["attacker"] * 4)
    first = add("client")
    assert first is not None
    add("other")
    assert (connections._all.size, closed) == (8, ["attacker"] * 4)
    add("another")
    assert closed == ["attacker"] * 5
    for _ in range(2):
        connections.remove(first)  # the second time has no effect
    assert connections._all.size == 7


def test_addresses_of_one_ipv6_network_have_one_share() -> None:
    with socket.socket(socket.AF_INET6) as six, socket.socket() as four, socket.socket(socket.AF_UNIX) as path:
        assert _host(six, ("2001:db8::1", 1, 0, 0)) == _host(six, ("2001:db8::2", 1, 0, 0))
        assert _host(six, ("2001:db8:0:1::1", 1, 0, 0)) != _host(six, ("2001:db8::1", 1, 0, 0))
        assert _host(six, ("::ffff:10.0.0.1", 1, 0, 0)) == _host(four, ("10.0.0.1", 1)) == "10.0.0.1"
        assert _host(path, "") == ""


def test_no_file_descriptor_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Accepting fails once for each event, not once for each connection that waits, and pauses."""
    attempts = 0

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal attempts
            attempts += 1
            raise OSError(24, "Too many open files")

    async def run() -> None:
        listener = Listener()
        listener.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listener, Connections(8), lambda _: asyncio.Protocol(), handshake_seconds=1)
        with socket.create_connection(listener.getsockname()):
            for _ in range(100):
                await asyncio.sleep(0)
        acceptor.close()

    asyncio.run(run())
    assert attempts == 1
    assert "cannot accept a connection: Too many open files" in caplog.text


def test_the_limit_leaves_file_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection_limit(100) == 100
    assert 0.8 * file_limit() - 32 < connection_limit(None) < file_limit()
    monkeypatch.setattr("chairlift.machine.files.file_limit", lambda: FEW_FILES)
    assert connection_limit(None) == 24
    assert connection_limit(None, files_each=2) == 12
    with pytest.raises(InvalidParameter, match="max_connections: the limit of 64 open files leaves room for 24"):
        connection_limit(25)
    monkeypatch.setattr("chairlift.machine.files.file_limit", lambda: 32)
    with pytest.raises(InvalidParameter, match="leaves room for 0 connections; raise it with ulimit -n"):
        connection_limit(None)


def test_the_lines_of_one_statement_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("chairlift.server.http.listener.time.monotonic", lambda: now)
    limit, passed = LogLimit(), []

    def log(line: int, text: str) -> None:
        record = logging.LogRecord("chairlift.server", logging.ERROR, "file.py", line, "%s", (text,), None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for number in range(100):
        log(1, f"stranger {number}")
    log(2, "another statement")
    assert passed == [*(f"stranger {number}" for number in range(10)), "another statement"]
    now = 61.0
    log(1, "again")
    assert passed[-1] == "again (90 more such lines were left out)"


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with front_end() as front:
        for _ in range(30):
            with front.connect() as connection:
                assert status(connection, b"hello\r\n\r\n") == 400
    assert len(caplog.records) <= 10

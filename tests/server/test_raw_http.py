"""Malformed HTTP on bare sockets, to a server and to the ingress of a fleet: each probe gets an error or a closed
connection, and others are served."""

from __future__ import annotations

import json
import re
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from chairlift.server.access import KeySources, KeyTable
from chairlift.server.config import ServerConfig
from chairlift.server.wire.limits import Limits
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP, WAIT_SECONDS, wait_for

BODY = json.dumps({"model": NAME, "prompt": "hello"}).encode()
HOST = b"host: localhost\r\n"
JSON = b"content-type: application/json\r\n"
LIMITS = Limits(header_seconds=0.5, body_seconds=0.5, stall_seconds=0.5, keep_alive_seconds=1)


def get(
    target: bytes = b"/health", version: bytes = b"HTTP/1.1", method: bytes = b"GET", headers: bytes = HOST
) -> bytes:
    return method + b" " + target + b" " + version + b"\r\n" + headers + b"\r\n"


def post(headers: bytes, body: bytes = BODY, target: bytes = b"/v1/completions") -> bytes:
    return b"POST " + target + b" HTTP/1.1\r\n" + HOST + JSON + headers + b"\r\n" + body


LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
VERSIONS = [
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/9.9",
    b"HTTP/1",
    b"http/1.1",
    b"HTTP/1.1 x",
    b"HTTP",
    b"",
    b"HTTP/-1.1",
]
METHODS = [
    b"",
    b" ",
    b"G\x00T",
    b"GE T",
    b"get",
    b"G" * 5000,
    b"\xff",
    b"GET\t",
    b"CONNECT",
    b"TRACE",
    b"PRI",
    b"POST /x",
]
TARGETS = [
    b"",
    b"*",
    b"health",
    b"//health",
    b"/%",
    b"/%zz",
    b"/%00",
    b"/\x00",
    b"/\xff\xfe",
    b"/a b",
    b"/a\tb",
    b"/../..",
    b"/?" + b"a" * 9000,
    b"http://other/health",
    b"https://user:pass@host/health",
    b"/#fragment",
    b"/;a=b",
    b"/health/",
    b"/%2e%2e/%2e%2e",
    b"\\health",
    b"%2F@127.0.0.1:9/x",
    b"%2f:99999/",
    b"%2f[",
    b"%68ealth",
    b"@127.0.0.1:9/x",
    b"/@127.0.0.1:9/x",
    b"/%2F@127.0.0.1:9/x",
    b"//127.0.0.1:9/x",
    b"/[",
    b"/:99999/",
    b"/%23",
    b"#",
    b"/health#x",
    b"/v1/models?x#y",
    b"?",
    b"/v1/models/",
]
HEADERS = [
    b"",
    b"host\r\n",
    b": x\r\n",
    b"host : localhost\r\n",
    b" host: localhost\r\n",
    HOST + HOST,
    HOST + b"x\r\n",
    HOST + b"x:\x00\r\n",
    HOST + b"x y: z\r\n",
    HOST + b"x: \r\n y\r\n",
    HOST + b"\xff: x\r\n",
    HOST + b"x: \xff\r\n",
    b"host: \r\n",
    b"host: a b\r\n",
    b"host: [::\r\n",
    b"host: localhost:99999999\r\n",
    b"host: evil.example\r\n",
    b"host: " + b"a" * 3000 + b"\r\n",
    HOST + b"x: y\r\n" * 200,
    HOST + b"x: " + b"y" * 40_000 + b"\r\n",
    HOST + b"\r\r\n",
    HOST + b"x: y\n",
    HOST + b"x\x7f: y\r\n",
    HOST + b"connection: upgrade\r\nupgrade: h2c\r\n",
    HOST + b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: x\r\n",
    HOST + b"expect: nothing\r\n",
    HOST + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n",
    HOST + b"range: bytes=0-99999999999\r\n",
    HOST + b"te: trailers, x\r\n",
]
LENGTHS = [
    b"-1",
    b"+5",
    b"0x10",
    b"1e3",
    b"",
    b" ",
    b"5 5",
    b"5,5",
    b"5, 6",
    b"99999999999999999999999",
    b"\xff",
    b"1.5",
    b"abc",
    b"0",
    b"1",
]
CODINGS = [
    b"chunked, chunked",
    b"gzip, chunked",
    b"chunked, identity",
    b"identity",
    b"x",
    b"",
    b"chunked;q=1",
    b"\x0bchunked",
    b"Chunked",
    b"chunked x",
]
CHUNKS = [
    b"zz\r\n",
    b"-1\r\n",
    b"0x5\r\nhello\r\n",
    b"5\nhello\n0\n\n",
    b"5\r\nhello0\r\n\r\n",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"5;" + b"x" * 9000 + b"\r\n",
    b"\r\n",
    b"5\r\nhel",
    b"1\r\n{\r\n" * 50 + b"0\r\n\r\n",
    b"0\r\nx: y\r\n\r\n",
    b"0\r\n" + b"x: y\r\n" * 300 + b"\r\n",
    b" 5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"00000000000000000000005\r\nhello\r\n0\r\n\r\n",
]
DEEP, DIGITS = b"[" * 900 + b"]" * 900, b"9" * 5000
VALUES = [
    *(
        b'{"prompt": %b}' % value
        for value in (DEEP, b"[%b]" % DIGITS, b"[[1], %b]" % DEEP, b'["a", 1]', b"NaN", b"-1e999")
    ),
    *(
        b'{"prompt": "a", "%b": %b}' % (name, DIGITS)
        for name in (b"n", b"max_tokens", b"cache_salt", b"model", b"user")
    ),
    *(b'{"prompt": "a", "%b": %b}' % (name, b"9" * 4000) for name in (b"n", b"max_tokens", b"cache_salt", b"model")),
    b'{"prompt": "a", "n": 1000000000, "max_tokens": 9223372036854775807}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"}",
    b"\xef\xbb\xbf{}",
    BODY[:-1].decode().encode("utf-16"),
]
OTHERS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-OpenSSH_9.0\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 500,
    b"\x00" * 1000,
    b"\xff" * 1000,
    b"GET",
    b"GET /",
    b"GET / HTTP/1.1",
    b"GET / HTTP/1.1\r\n",
    b"\n",
    b"EHLO x\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"<xml/>\r\n\r\n",
    b"{}\r\n\r\n",
]

PATHS = (
    *(b"/health", b"/ready", b"/metrics", b"/version", b"/dashboard", b"/dashboard/stream", b"/cluster/replicas"),
    *(b"/v1/models", b"/v1/chat/completions", b"/v1/responses", b"/v1/messages", b"/v1/embeddings", b"/v1/files"),
    *(
        b"/v1/files/x",
        b"/v1/batches",
        b"/tokenize",
        b"/api/chat",
        b"/api/tags",
        b"/completion",
        b"/props",
        b"/score",
        b"/x",
        b"/",
        b"//",
        b"/openapi.json",
        b"/usage-reports/x",
    ),
)


def probes_of(path: bytes) -> list[bytes]:
    """The oddities that have a path."""
    return [
        *(get(path, version=version) for version in VERSIONS),
        *(get(path, method=method) for method in METHODS),
        *(get(path, headers=headers) for headers in HEADERS),
        *(post(b"content-length: " + length + b"\r\n", target=path) for length in LENGTHS),
        *(post(b"transfer-encoding: " + coding + b"\r\n", b"0\r\n\r\n", path) for coding in CODINGS),
        *(post(CHUNKED, chunks, path) for chunks in CHUNKS),
        *(post(b"content-length: %d\r\n" % len(value), value, path) for value in VALUES),
        post(LENGTH + CHUNKED, target=path),
        post(LENGTH + b"content-length: 5\r\n", target=path),
        post(LENGTH + b"content-encoding: br\r\n", target=path),
        post(LENGTH + JSON, target=path),
        post(LENGTH, BODY + b"GARBAGE\r\n\r\n", path),
        post(LENGTH, target=path) * 3 + b"\x00",
        get(path) * 20 + b"BAD\r\n\r\n",
    ]


PROBES = [
    *(get(target=target) for target in TARGETS),
    *(get(version=version) for version in VERSIONS),
    *(get(method=method) for method in METHODS),
    *(get(headers=headers) for headers in HEADERS),
    *probes_of(b"/v1/completions"),
    *(post(b"content-length: %d\r\n" % len(value), value, b"/v1/chat/completions") for value in VALUES),
    post(LENGTH, target=b"/v1/files"),
    *OTHERS,
]


@dataclass
class Target:
    """What the probes are sent to, and the front end that answers."""

    url: str
    front: FrontEnd


@pytest.fixture(scope="module", params=["server", "ingress"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if request.param == "server":
        with front_end(limits=LIMITS) as running:
            yield Target(running.url, running)
        return
    pytest.importorskip("aiohttp", reason="needs Ray: pip install 'chairlift[ray]'")
    from chairlift.cluster.serving.fleet import replica_config
    from tests.cluster.fake_replica import KEY, ingress

    proxied = KeyTable(KeySources(proxy=KEY).read())
    config = ServerConfig(NAME, limits=LIMITS)
    with (
        front_end(keys=proxied, limits=replica_config(config).limits) as running,
        ingress(servers=[running.url], config=config) as (url, _),
    ):
        yield Target(url, running)


def probe(target: Target, sent: bytes) -> tuple[list[int], bytes]:
    """Send a probe; return the statuses and the whole reply, read until the server closes the connection."""
    reply, address = b"", urlsplit(target.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_SECONDS) as connection:
        try:
            connection.sendall(sent)
            select.select([connection], [], [], 0.3)  # a relayed answer to a client that ends at once may be lost
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                reply += data
        except (ConnectionResetError, BrokenPipeError):
            pass
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", reply)], reply


def check_probes(target: Target, probes: list[bytes]) -> None:
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda sent: probe(target, sent), probes))
    for sent, (statuses, reply) in zip(probes, replies, strict=True):
        is_stream = b"/dashboard/stream" in sent  # of which there are only so many
        assert all(status < 500 or (status == 503 and is_stream) for status in statuses), (sent[:200], reply[:500])
        assert reply == b"" or statuses, (sent[:200], reply[:500])
        if statuses and statuses[-1] >= 400 and not sent.startswith(b"HEAD"):
            body = json.loads(reply[reply.rindex(b"\r\n\r\n") + 4 :])
            assert body["error"].keys() >= {"message", "type"}, (sent[:200], reply[:500])
    refused = sum(bool(statuses) and statuses[-1] >= 400 for statuses, _ in replies)
    assert refused > len(probes) // 2
    answer = HTTP.post(target.url + "/v1/completions", content=BODY, headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == "ok"
    wait_for(lambda: target.front.engine.num_open == 0, "the requests to end")


def test_no_probe_makes_the_server_fail_or_hang(target: Target) -> None:
    assert len(PROBES) >= 200
    check_probes(target, PROBES)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_no_path_fails_or_hangs(target: Target, path: bytes) -> None:
    check_probes(target, probes_of(path))


@pytest.mark.parametrize(
    "sent", [b"%2F@HOST/x", b"%2f:99999/", b"%2f[", b"@HOST/x", b"http://HOST/x", b"/x#", b"/?#", b"*"]
)
def test_a_target_that_is_no_path_is_refused(target: Target, sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        statuses, reply = probe(target, get(sent.replace(b"HOST", b"127.0.0.1:%d" % other.getsockname()[1])))
        with pytest.raises(BlockingIOError):  # no connection waits to be accepted
            other.accept()
    assert statuses == [400], reply
    assert b"must begin with '/'" in reply


@pytest.mark.parametrize("method", [b"post", b"Post", b"TRACE"])
def test_a_method_in_another_case_is_another_method(target: Target, method: bytes) -> None:
    """An HTTP client writes it in upper case, so that an ingress would relay a request past the limits of its key."""
    before = len(target.front.engine.received)
    statuses, reply = probe(target, post(LENGTH + b"connection: close\r\n").replace(b"POST", method, 1))
    assert statuses == [405], reply
    assert len(target.front.engine.received) == before


@pytest.mark.parametrize("path", [b"/health/", b"/dashboard/", b"/v1/models/", b"/v1/completions/", b"/metrics/"])
def test_no_path_is_redirected(target: Target, path: bytes) -> None:
    statuses, reply = probe(target, get(path) + post(LENGTH, target=path))
    assert statuses
    assert set(statuses) <= {404, 405}, reply
    assert b"location:" not in reply.lower()


def test_the_headers_that_an_ingress_adds_do_not_count(target: Target) -> None:
    """A client may send as many headers to an ingress as to a server."""
    for count in (LIMITS.max_headers - 1, LIMITS.max_headers):
        lines = b"".join(b"x-%d: y\r\n" % number for number in range(count - 1))
        statuses, reply = probe(target, get(b"/v1/models", headers=HOST + lines + b"connection: close\r\n"))
        assert statuses == [200 if count < LIMITS.max_headers else 431], reply

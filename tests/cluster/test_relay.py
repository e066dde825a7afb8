"""The ingress relays requests to replicas that answer, die or refuse."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from chairlift.server.access import KeySources
from chairlift.server.config import ServerConfig, encode_config
from chairlift.server.wire.limits import Limits
from tests.cluster.fake_replica import KEY, FakeReplica, die, ingress, stream, whole
from tests.server.running_server import HTTP, wait_for

pytest.importorskip("aiohttp", reason="needs Ray: pip install 'chairlift[ray]'")

COMPLETIONS = "/v1/completions"
EVENT, DONE = 'data: {"choices": [{"text": "a"}]}\n\n', "data: [DONE]\n\n"


def post(url: str, path: str = COMPLETIONS, body: object = None, **headers: str) -> httpx.Response:
    given = {"prompt": "hello", "model": "tiny"} if body is None else body
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.post(url + path, json=given, headers=names)


def test_a_request_is_relayed_with_the_replicas_key_and_the_clients_name(tmp_path: Path) -> None:
    replica = FakeReplica(whole(200))
    config = ServerConfig("tiny", keys=KeySources(["alice secret"]))
    with ingress(replica, config=config) as (url, _):
        assert post(url).status_code == 401
        assert post(url, authorization="Bearer wrong").status_code == 401
        spoofed = {"x_chairlift_client": "bob", "x_chairlift_client_key": "00", "x_request_id": "mine"}
        response = post(url, "/v1/completions?x=%20y", authorization="Bearer secret", **spoofed)
        assert response.json() == {"ok": True}
        assert response.headers.get_list("x-request-id") == ["mine"]
    (request,) = replica.requests
    assert request.head.startswith("POST /v1/completions?x=%20y HTTP/1.1")
    assert request.header("x-api-key") == KEY
    assert request.header("authorization") is None
    assert request.header("x-chairlift-client") == "alice"
    assert request.header("x-chairlift-client-key") != "00"
    assert request.header("x-request-id") == "mine"
    assert json.loads(request.body) == {"prompt": "hello", "model": "tiny"}


def test_headers_of_a_connection_and_the_path_are_relayed_as_a_proxy_should() -> None:
    replica = FakeReplica(whole(200))
    headers = {"connection": "close, X-Hop", "x_hop": "1", "proxy_authorization": "x", "accept_encoding": "gzip"}
    with ingress(replica) as (url, _):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
            head = "\r\n".join(["GET /v1/./x/../models%2Fa?b=%41+c HTTP/1.1", "host: localhost", *lines])
            connection.sendall(f"{head}\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    (request,) = replica.requests
    assert request.head.startswith("GET /v1/./x/../models%2Fa?b=%41+c HTTP/1.1")
    assert [request.header(name) for name in ("x-hop", "proxy-authorization")] == [None, None]
    assert request.head.lower().count("accept-encoding: identity") == request.head.lower().count("accept-encoding") == 1


def test_other_paths_of_an_endpoint_are_guarded_and_routed_as_its_own(tmp_path: Path) -> None:
    answer = '{"usage": {"prompt_tokens": 2, "completion_tokens": 1000}}'
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: secret, requests_per_minute: 5}\n")
    replica = FakeReplica(whole(200, answer))
    paths = ["//v1/completions", "/completions", "/v1//completions", "/%2Fv1/completions"]
    with ingress(replica, config=ServerConfig("tiny", keys=KeySources([], keys))) as (url, _):
        for path in paths:
            assert post(url, path).status_code == 401
            assert post(url, path, authorization="Bearer secret").json() == json.loads(answer)
        assert post(url, "//v1/files", authorization="Bearer secret").json()["error"]["code"] == "files_disabled"
        assert post(url, "//completions", authorization="Bearer secret").status_code == 429
    assert [request.head.split()[1] for request in replica.requests] == paths


def test_the_names_of_ignored_fields_are_relayed() -> None:
    with ingress(FakeReplica(whole(200, x_chairlift_ignored_fields="colour, messages[0].mood"))) as (url, _):
        assert post(url).headers["x-chairlift-ignored-fields"] == "colour, messages[0].mood"


def test_only_generated_responses_count_for_the_expected_output() -> None:
    with ingress(FakeReplica(whole(200, x_chairlift_usage="2 1000 ok"))) as (url, table):
        expected = table._router._mean_output
        assert [HTTP.get(f"{url}/v1/models").status_code for _ in range(3)] == [200] * 3
        assert post(url, "/v1/embeddings", {"input": "hello"}).status_code == 200
        assert table._router._mean_output == expected
        assert post(url).status_code == 200
        wait_for(lambda: table._router._mean_output > expected, "the output to be counted")


def test_connections_to_replicas_are_probed() -> None:
    from chairlift.cluster.serving.relay import _probing_socket

    with _probing_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as found:
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


@pytest.mark.parametrize("first", [die, whole(503)], ids=["died", "draining"])
def test_a_replica_that_fails_before_its_first_byte_is_replaced_by_another(first: object) -> None:
    bad, good = FakeReplica(first), FakeReplica(whole(200))  # type: ignore[arg-type]
    with ingress(bad, good) as (url, table):
        assert [post(url).status_code for _ in range(4)] == [200] * 4
        assert table.replicas()[0].state == "failing"
    assert len(bad.requests) == 1, "a replica that failed is avoided"
    assert good.requests[0].body == bad.requests[0].body


def test_a_request_is_tried_twice_at_most() -> None:
    replicas = [FakeReplica(die), FakeReplica(die), FakeReplica(die)]
    with ingress(*replicas) as (url, _):
        response = post(url)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable")
    assert sum(len(replica.requests) for replica in replicas) == 2


def test_other_refusals_are_relayed() -> None:
    replicas = [FakeReplica(whole(429, '{"error": {}}')) for _ in range(2)]
    with ingress(*replicas) as (url, _):
        assert post(url).status_code == 429
    assert sum(len(replica.requests) for replica in replicas) == 1


def test_without_a_replica_the_answer_is_503() -> None:
    with ingress() as (url, _):
        assert post(url).status_code == 503
        assert HTTP.get(f"{url}/health").status_code == 503
        refused = post(url, "/v1/messages")
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert refused.headers.get_list("request-id") == [refused.json()["request_id"]]


def test_errors_of_replicas_are_not_converted_twice() -> None:
    error = '{"type": "error", "error": {"type": "not_found_error", "message": "no such model"}}'
    with ingress(FakeReplica(whole(404, error, request_id="its own"))) as (url, _):
        answer = post(url, "/v1/messages", x_request_id="mine")
        assert answer.json() == json.loads(error)
        assert answer.headers.get_list("request-id") == ["mine"]


def events_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


def test_a_stream_that_is_cut_ends_with_one_error() -> None:
    replica = FakeReplica(stream(EVENT, EVENT[:10], ends=False))
    with ingress(replica) as (url, _):
        events = events_of(post(url, body={"prompt": "hello", "stream": True}).text)
    assert events[0] == EVENT.strip()
    assert json.loads(events[1].removeprefix("data: "))["error"]["type"] == "service_unavailable"
    assert events[2:] == [DONE.strip()]


def test_a_stream_that_is_cut_after_its_last_event_is_complete() -> None:
    with ingress(FakeReplica(stream(EVENT, DONE, ends=False))) as (url, _):
        assert post(url, body={"prompt": "hello", "stream": True}).text == EVENT + DONE


@pytest.mark.parametrize(
    ("path", "last", "expected"),
    [
        ("/v1/messages", {}, {"type": "error", "request_id": "mine"}),
        ("/v1/responses", {"sequence_number": 7}, {"type": "error", "sequence_number": 8, "param": None}),
    ],
)
def test_each_api_has_its_own_error_event(path: str, last: dict[str, int], expected: dict[str, object]) -> None:
    before = f"event: x\ndata: {json.dumps(last)}\n\n"
    with ingress(FakeReplica(stream(before, ends=False))) as (url, _):
        events = events_of(post(url, path, {"stream": True}, x_request_id="mine").text)
    name, data = events[1].split("\n")
    assert (len(events), name) == (2, "event: error")
    assert json.loads(data.removeprefix("data: ")).items() >= expected.items()


LINE, LAST_LINE = '{"message":{"content":"a"},"done":false}\n', '{"done":true,"eval_count":1}\n'


def test_lines_of_json_are_relayed_as_a_stream(tmp_path: Path) -> None:
    """Whole lines arrive without the reports between them, and a line with an error follows those of a dead replica."""
    report = ": usage 7 3 ok\n"
    for ends in (True, False):
        pieces = (report[:5], report[5:] + LINE, LINE[:9], LINE[9:] + report + LAST_LINE)
        replica = FakeReplica(stream(*pieces, ends=ends, media_type="application/x-ndjson"))
        log = tmp_path / f"log-{ends}"
        with ingress(replica, config=ServerConfig("tiny", access_log=log)) as (url, _):
            assert post(url, "/api/chat", {"messages": []}).text == LINE * 2 + LAST_LINE
        assert json.loads(log.read_text())["completion_tokens"] == 3
    with ingress(FakeReplica(stream(LINE, LINE[:9], ends=False, media_type="application/x-ndjson"))) as (url, _):
        first, error = post(url, "/api/chat", {"messages": []}).text.splitlines(keepends=True)
    assert first == LINE
    assert json.loads(error).keys() == {"error"}


def test_llama_cpps_streams_end_with_its_error() -> None:
    whole, last = 'data: {"content":"a","stop":false}\n\n', 'data: {"content":"","stop":true}\n\n'
    with ingress(FakeReplica(stream(whole, ends=False))) as (url, _):
        events = events_of(post(url, "/completion", {"prompt": "a", "stream": True}).text)
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 503
    with ingress(FakeReplica(stream(whole, last, ends=False))) as (url, _):
        assert post(url, "/completion", {"prompt": "a", "stream": True}).text == whole + last


def test_a_whole_response_that_is_cut_closes_the_connection() -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"a":')

    with ingress(FakeReplica(half)) as (url, _), pytest.raises(httpx.RemoteProtocolError):
        post(url)


def test_events_in_pieces_arrive_whole() -> None:
    pieces = [EVENT[:7], EVENT[7:-1], EVENT[-1:] + EVENT, DONE]
    with ingress(FakeReplica(stream(*pieces))) as (url, _):
        assert post(url, body={"prompt": "hello", "stream": True}).text == EVENT * 2 + DONE


async def forever(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("answer", [forever, stream(EVENT, then=forever)], ids=["waiting", "streaming"])
def test_a_client_that_leaves_closes_the_connection_to_the_replica(answer: object) -> None:
    replica = FakeReplica(answer)  # type: ignore[arg-type]
    with ingress(replica) as (url, table):
        connection = _send(url, {"prompt": "hello", "stream": True})
        wait_for(lambda: replica.requests, "the request")
        if answer is not forever:
            assert connection.recv(100)
        assert not replica.closed.is_set()
        connection.close()
        assert replica.closed.wait(10)
        wait_for(lambda: table._router.loads["0"] == 0, "the load to be given back")


def test_a_client_that_does_not_read_stops_the_replica() -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        event = "data: " + "x" * 60_000 + "\n\n"
        while sent < 400:
            writer.write(f"{len(event):x}\r\n{event}\r\n".encode())
            await writer.drain()
            sent += 1

    with ingress(FakeReplica(stream(then=flood))) as (url, _):
        connection = _send(url, {"prompt": "hello", "stream": True})
        wait_for(lambda: sent > 5, "the stream")
        last = -1
        while last != sent:
            last = sent
            time.sleep(0.3)
        assert sent < 300, "24 MB do not fit into the buffers of sockets"
        connection.close()


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Those of this process's garbage collection, which an ingress changes for its own."""
    before, usual = gc.get_threshold(), (700, 10, 10)  # A server in this process may have changed them.
    gc.set_threshold(*usual)
    yield usual
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_an_ingress_that_stops_answers_what_it_has_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.cluster.serving.ingress import Ingress

    release = threading.Event()

    async def until_released(writer: asyncio.StreamWriter) -> None:
        while not release.is_set():
            await asyncio.sleep(0.02)

    replica = FakeReplica(stream(EVENT, then=until_released))
    with ingress(replica) as (_, table), ThreadPoolExecutor(2) as pool, httpx.Client() as idle:
        monkeypatch.setattr("chairlift.cluster.serving.ingress.routing_table", lambda _: table)
        handle = SimpleNamespace(options=lambda: None)
        own = Ingress(handle, encode_config(ServerConfig("tiny", port=0)), "round-robin", "1", shared=False)
        url = own.status()["address"]
        assert idle.get(f"{url}/health").status_code == 200
        answer = pool.submit(post, url, body={"prompt": "hello", "stream": True})
        wait_for(lambda: replica.requests, "the request")
        late = _send(url, {"prompt": "late"}, part=5)
        wait_for(lambda: own._relay.num_open == 2, "the beginning of the other request")
        stopped = pool.submit(own.__del__)
        time.sleep(2.5)  # a server that has drained gives uvicorn 2 s
        with pytest.raises(httpx.ConnectError):
            idle.get(f"{url}/health")  # on its open connection, which is closed too
        release.set()
        assert answer.result(10).text == EVENT
        late.sendall(json.dumps({"prompt": "late"}).encode()[5:])
        assert late.recv(100).startswith(b"HTTP/1.1 200")
        late.close()
        stopped.result(10)


def test_loaded_objects_of_an_ingress_are_not_collected(
    monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, int, int]
) -> None:
    """Each full collection would visit all modules, and one body with many values causes several."""
    from chairlift.cluster.serving.ingress import Ingress

    before = gc.get_freeze_count()
    with ingress() as (_, table):
        monkeypatch.setattr("chairlift.cluster.serving.ingress.routing_table", lambda _: table)
        handle = SimpleNamespace(options=lambda: None)
        own = Ingress(handle, encode_config(ServerConfig("tiny", port=0)), "round-robin", "1", shared=False)
        frozen, during = gc.get_freeze_count(), gc.get_threshold()
        own.__del__()
    assert frozen > before + 10_000
    assert during[0] > thresholds[0]


def _send(url: str, body: object, part: int | None = None) -> socket.socket:
    """Send a request; with `part`, only so many bytes of its body."""
    address = urlsplit(url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((address.hostname, address.port))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data[:part])
    return connection


def test_large_bodies_are_relayed_whole() -> None:
    replica, body = FakeReplica(whole(200)), {"prompt": "é" * 400_000}
    with ingress(replica, policy="prefix-affine") as (url, _):
        assert post(url, body=body).status_code == 200
    assert json.loads(replica.requests[0].body) == body


def test_limits_of_keys_hold_for_the_whole_fleet(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: secret, requests_per_minute: 3}\nbob: {key: other, tokens_per_minute: 150}\n")
    replicas = [FakeReplica(whole(200, x_chairlift_usage="2 100 ok")) for _ in range(2)]
    with ingress(*replicas, config=ServerConfig("tiny", keys=KeySources(file=keys))) as (url, _):
        statuses = [post(url, authorization="Bearer secret").status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        body = {"prompt": "hello", "max_tokens": 100}
        statuses = [post(url, body=body, authorization="Bearer other").status_code for _ in range(2)]
        assert statuses == [200, 429]
        page = HTTP.get(f"{url}/metrics", headers={"x-api-key": "other"}).text
        assert 'chairlift_requests_rate_limited_total{replica="ingress",key="alice",limit="requests"} 1.0' in page


def test_the_access_log_has_the_tokens_of_responses(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    with ingress(
        FakeReplica(whole(200, x_chairlift_usage="2 100 ok")), config=ServerConfig("tiny", access_log=log)
    ) as (url, _):
        assert post(url).status_code == 200
        assert post(url, "/v1/embeddings", {"input": "hello"}).status_code == 200
    with ingress(FakeReplica(whole(200)), config=ServerConfig("tiny", access_log=log)) as (url, _):
        assert HTTP.get(f"{url}/v1/models").status_code == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200] * 3
    assert [line.get("prompt_tokens") for line in lines] == [2, 2, None]
    assert [line.get("completion_tokens") for line in lines] == [100, 100, None]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_prompts_with_equal_prefixes_go_to_one_replica(path: str) -> None:
    replicas = [FakeReplica(whole(200)) for _ in range(2)]
    with ingress(*replicas, policy="prefix-affine") as (url, _):
        for group in ("a", "b"):
            for index in range(4):
                messages = [{"role": "system", "content": group * 2000}, {"role": "user", "content": str(index)}]
                assert post(url, path, {"messages": messages}).status_code == 200
    seen = [{json.loads(one.body)["messages"][0]["content"][0] for one in replica.requests} for replica in replicas]
    assert sorted(map(sorted, seen)) == [["a"], ["b"]]


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1//files", "/v1/files/", "/v1/batches", COMPLETIONS, "/x", "/health", "/metrics"]
)
def test_every_path_has_the_limits_of_bodies(path: str) -> None:
    replica = FakeReplica(whole(200))
    config = ServerConfig("tiny", limits=Limits(max_body_bytes=1000, max_body_values=10))
    with ingress(replica, config=config) as (url, _):
        assert HTTP.post(url + path, content=b"x" * 1001).status_code == 413
        pieces = HTTP.post(url + path, content=iter([b"x" * 400] * 3))  # without a length
        assert pieces.status_code in (404, 413)
        assert HTTP.post(url + path, content=b"," * 11).status_code in (400, 404)
    assert replica.requests == []


def test_a_fleet_has_no_files() -> None:
    replica = FakeReplica(whole(200))
    with ingress(replica) as (url, _):
        for path in ("/v1/files", "/v1/files/x/content", "/v1/batches", "/v1/batches/x/cancel"):
            for method in ("GET", "POST", "DELETE"):
                refused = HTTP.request(method, url + path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "files_disabled")
    assert replica.requests == []


# ---- requests that kill engines ----------------------------------------------------------------------------------

DIED = "x-chairlift-usage", "5 0 died"  # the report of a replica whose engine died during the request


def test_a_request_that_killed_its_engine_is_not_sent_to_another() -> None:
    replicas = [FakeReplica(whole(503, "{}", **{DIED[0]: DIED[1]})) for _ in range(2)]
    with ingress(*replicas) as (url, _):
        first = post(url)
        assert (first.status_code, first.headers["retry-after"]) == (503, "1")
        assert sum(len(replica.requests) for replica in replicas) == 1
        assert (
            post(url, body={"prompt": "hello", "model": "tiny", "user": "another", "stream": True}).status_code == 503
        )
        assert sum(len(replica.requests) for replica in replicas) == 2
        refused = post(url)
        assert refused.status_code == 400
        assert "when the engine died 2 times" in refused.json()["error"]["message"]
        post(url, body={"prompt": "another"})
    assert sum(len(replica.requests) for replica in replicas) == 3


def test_requests_beside_the_one_that_killed_the_engine_are_answered_by_another_replica() -> None:
    def reports_death(replica: FakeReplica) -> None:
        dies = whole(503, "{}", **{DIED[0]: DIED[1]})

        async def answer(writer: asyncio.StreamWriter) -> None:
            while len(replica.requests) < 3:
                await asyncio.sleep(0.01)
            await dies(writer)

        replica.answer = answer

    bad, good = FakeReplica(whole(200)), FakeReplica(whole(200))
    reports_death(bad)
    with ingress(bad, good) as (url, _), ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda number: post(url, body={"prompt": f"number {number}"}), range(6))
        assert [answer.status_code for answer in answers] == [200] * 6
    assert len(bad.requests) == 3


def test_with_isolated_keys_only_administrators_see_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: one}\nroot: {key: two, admin: true}")
    config = ServerConfig("tiny", keys=KeySources(file=file), isolate_keys=True)
    with ingress(FakeReplica(whole(200)), config=config) as (url, _):
        for path in ("/metrics", "/cluster/replicas", "/dashboard/stream"):
            refused = HTTP.get(url + path, headers={"authorization": "Bearer one"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed"), path
            with HTTP.stream("GET", url + path, headers={"authorization": "Bearer two"}) as allowed:
                assert allowed.status_code == 200, path


def test_one_key_cannot_take_all_pages_of_the_dashboard(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {keys: [one, two]}\nbob: {key: three}")
    with ExitStack() as pages, ingress(config=ServerConfig("tiny", keys=KeySources(file=file))) as (url, _):

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return pages.enter_context(HTTP.stream("GET", f"{url}/dashboard/stream", headers=headers)).status_code

        assert [status("one"), status("one"), status("two"), status("two"), status("two")] == [200] * 4 + [429]
        assert [status("three") for _ in range(4)] == [200] * 4
        assert status("three") == 503
        pages.close()
        wait_for(lambda: status("one") == 200, "a page to be closed")
        pages.close()


def test_a_page_of_another_origin_reaches_no_replica() -> None:
    replica = FakeReplica(whole(200))
    with ingress(replica) as (url, _):
        page = {"origin": "https://evil.example"}
        assert HTTP.post(f"{url}/v1/completions", json={}, headers=page).status_code == 403
    assert not replica.requests


def test_the_request_log_of_an_ingress_shows_what_replicas_report(capfd: pytest.CaptureFixture[str]) -> None:
    replica = FakeReplica(whole(200, x_chairlift_usage="2 100 ok"))
    said: list[str] = []

    def read() -> str:
        said.append(capfd.readouterr().err)
        return "".join(said)

    with ingress(replica, config=ServerConfig("tiny", request_log=True)) as (url, _):
        assert post(url).status_code == 200
        wait_for(lambda: f"POST {COMPLETIONS}  200  in 2  out 100  " in read(), "the line")

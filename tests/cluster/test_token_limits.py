"""A fleet counts what requests use by the reports of its replicas, also of clients that leave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.errors import EngineDied
from chairlift.server.access import KeySources, KeyTable
from chairlift.server.config import ServerConfig
from chairlift.server.generation.usage import UsageReport, take_comments
from chairlift.server.wire.messages import Cancel, Submit, ToEngine, Update
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, front_end
from tests.server.running_server import HTTP, wait_for
from tests.server.test_key_limits import leave_unread, write_much

pytest.importorskip("aiohttp", reason="needs Ray: pip install 'chairlift[ray]'")
from tests.cluster.fake_replica import KEY, ingress

LIMIT, USED = 1000, 500  # tokens per minute, and those of a request
ENDLESS = "endless"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
OURS = {"authorization": "Bearer secret"}


def answer_much(engine: ScriptedEngine, message: ToEngine) -> None:
    """Answers with 500 tokens; a prompt of more than 99 tokens gets no end."""
    if isinstance(message, Submit):
        for number in range(10):
            last = number == 9 and len(message.prompt) < 100
            reason = "length" if last else None
            engine.publish(Update(message.request_id, text="a" * 50, tokens=[5] * 50, finish_reason=reason))


class Fleet:
    def __init__(self, url: str, front: FrontEnd) -> None:
        self.url, self.front = url, front

    def body(self, path: str, *, stream: bool, endless: bool) -> dict[str, Any]:
        text = ENDLESS * 20 if endless else "hi"
        given: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": text},
            "/v1/responses": {"input": text},
            "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        }
        chat = {"messages": [{"role": "user", "content": text}]}
        return {"model": NAME, "stream": stream, **given.get(path, chat)}

    def tokens_left(self) -> int:
        """Those of the key; asking costs a request without tokens, since its body is refused."""
        refused = HTTP.post(self.url + "/v1/completions", json={"model": NAME}, headers=OURS)
        return int(refused.headers["x-ratelimit-remaining-tokens"])

    def cancelled(self) -> int:
        return sum(isinstance(message, Cancel) for message in self.front.engine.received)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"alice: {{key: secret, tokens_per_minute: {LIMIT}}}\n")
    config = ServerConfig(NAME, keys=KeySources(file=keys))
    proxied = KeyTable(KeySources(proxy=KEY).read())
    with front_end(answer_much, keys=proxied) as front, ingress(servers=[front.url], config=config) as (url, _):
        yield Fleet(url, front)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_charged_and_shows_no_report(fleet: Fleet, path: str, stream: bool) -> None:
    response = HTTP.post(fleet.url + path, json=fleet.body(path, stream=stream, endless=False), headers=OURS)
    assert response.status_code == 200, response.text
    assert ": usage" not in response.text
    assert not [name for name in response.headers if name.startswith("x-chairlift-")]
    wait_for(lambda: fleet.tokens_left() < LIMIT - USED + 100, "the tokens to be charged")


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_charged_to_a_client_that_leaves_before_its_end(fleet: Fleet, path: str) -> None:
    body = fleet.body(path, stream=True, endless=True)
    with HTTP.stream("POST", fleet.url + path, json=body, headers=OURS) as response:
        received = 0
        for piece in response.iter_text():
            received += piece.count("a" * 50)
            if received:
                break
    wait_for(lambda: fleet.tokens_left() < LIMIT - 50, "the tokens to be charged")
    wait_for(lambda: fleet.cancelled() == 1, "the request to be cancelled")


def test_a_whole_response_is_charged_to_a_client_that_leaves_before_it(fleet: Fleet) -> None:
    body = fleet.body("/v1/completions", stream=False, endless=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(fleet.url + "/v1/completions", json=body, headers=OURS, timeout=1.0)
    wait_for(lambda: fleet.cancelled() == 1, "the request to be cancelled")
    wait_for(lambda: fleet.tokens_left() < LIMIT - USED + 100, "the tokens to be charged")


def test_tokens_that_a_client_does_not_read_are_charged(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: secret, tokens_per_minute: 2000}\n")
    config = ServerConfig(NAME, keys=KeySources(file=keys))
    proxied = KeyTable(KeySources(proxy=KEY).read())
    with front_end(write_much, keys=proxied) as front, ingress(servers=[front.url], config=config) as (url, _):
        fleet = Fleet(url, front)
        leave_unread(front, url, "secret")
        wait_for(lambda: fleet.cancelled() == 1, "the request to be cancelled")
        wait_for(lambda: fleet.tokens_left() < 1100, "the tokens to be charged")


def test_what_a_response_repeats_does_not_count(fleet: Fleet) -> None:
    """The response has the schemas of the tools, with the names of the fields of its usage."""
    usage = {"input_tokens": 0, "output_tokens": 0, "prompt_tokens": 0, "completion_tokens": 0}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}, "default": usage}}
    fields = {"tools": [tool], "tool_choice": "none", "metadata": {"x": ": usage 0 0 ok\n\n: usage 0 0 ok\n"}}
    for stream in (False, True):
        body = fleet.body("/v1/responses", stream=stream, endless=False) | fields
        before = fleet.tokens_left()
        response = HTTP.post(fleet.url + "/v1/responses", json=body, headers=OURS)
        assert response.status_code == 200, response.text
        wait_for(lambda before=before: fleet.tokens_left() < before - USED + 150, "the tokens to be charged")


def test_clients_cannot_ask_for_reports(fleet: Fleet) -> None:
    for headers in (OURS, OURS | {"x-chairlift-report": ""}):
        assert HTTP.get(fleet.url + "/usage-reports/x", headers=headers).status_code == 404
    assert HTTP.get(fleet.front.url + "/usage-reports/x", headers=OURS).status_code == 401


def test_reports_are_taken_out_of_events() -> None:
    text = json.dumps({"text": "\n\n: usage 1 1 ok\n"})
    events = f": usage 1 2 ok\ndata: {text}\n\n: usage 1 30 died\n: waiting\n\n".encode()
    assert take_comments(events) == (f"data: {text}\n\n: waiting\n\n".encode(), UsageReport(1, 30, True))
    assert take_comments(b"data: x\n\n") == (b"data: x\n\n", None)
    assert re.search(rb": usage", take_comments(b"data: : usage 1 2 ok\n\n")[0])


@pytest.mark.parametrize(("stream", "has_begun"), [(False, False), (True, False), (True, True)])
def test_servers_report_that_their_engine_died(stream: bool, has_begun: bool) -> None:
    def die(engine: ScriptedEngine, message: ToEngine) -> None:
        if isinstance(message, Submit):
            if has_begun:
                engine.requests.deliver(Update(message.request_id, text="a", tokens=[5]))
            engine.loop.call_soon(engine._fail_all, EngineDied("died"))

    proxied = KeyTable(KeySources(proxy=KEY).read())
    with (
        front_end(die, keys=proxied) as first,
        front_end(die, keys=proxied) as second,
        ingress(servers=[first.url, second.url]) as (url, _),
    ):
        body = {"model": NAME, "prompt": "hi", "stream": stream}
        statuses = [HTTP.post(url + "/v1/completions", json=body).status_code for _ in range(4)]
        assert statuses == [200 if has_begun else 503] * 2 + [400, 400]
        assert len(first.engine.received) + len(second.engine.received) == 2

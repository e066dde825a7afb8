"""Classes of service: how a request gets one, what it overrides, and what the metrics say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey, KeySources, KeyTable
from chairlift.server.config import ServerConfig, decode_config, encode_config, server_config
from chairlift.server.generation.usage import Timeline
from chairlift.server.http.guards import client_headers
from chairlift.server.metrics import Metrics
from chairlift.server.options import ServerOptions
from chairlift.server.wire.classes import CLASS_HEADER, ServiceClasses
from chairlift.server.wire.messages import Submit
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP
from tests.server.test_proxy_key import state_of

DECLARED = ("interactive=ttft:500,tpot:50", "batch=e2e:60000", "default=ttft:9000")
INTERACTIVE, BATCH, DEFAULT = Targets(0.5, 0.05), Targets(e2e=60.0), Targets(9.0)
CLASSES = ServiceClasses.of(DECLARED, "slack", None)
KEYS = "alice: {key: sk-alice, class: batch}\nbob: {key: sk-bob}\ncarol: {key: sk-carol, class: gold}\n"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PROMPT: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}


def post(front: FrontEnd, path: str, body: dict[str, Any], key: str = "sk-bob", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.post(front.url + path, json=body, headers={"authorization": f"Bearer {key}", **named})


def submitted(front: FrontEnd) -> tuple[str, Targets]:
    (message,) = (each for each in front.engine.received if isinstance(each, Submit))
    front.engine.received.clear()
    return message.service_class, message.targets


@pytest.fixture
def front(tmp_path: Path) -> Any:
    (tmp_path / "keys.yaml").write_text(KEYS)
    keys = KeyTable(KeySources(file=tmp_path / "keys.yaml").read())
    with front_end(keys=keys, service_options={"classes": CLASSES}) as made:
        yield made


def test_a_request_has_the_class_of_its_header_its_tier_or_its_key(front: FrontEnd) -> None:
    header = {CLASS_HEADER: "interactive"}
    for key, body, headers, found in (
        ("sk-bob", {}, {}, ("default", DEFAULT)),
        ("sk-bob", {"service_tier": "auto"}, {}, ("default", DEFAULT)),
        ("sk-bob", {"service_tier": "interactive"}, {}, ("interactive", INTERACTIVE)),
        ("sk-alice", {}, {}, ("batch", BATCH)),
        ("sk-alice", {"service_tier": "auto"}, {}, ("batch", BATCH)),
        ("sk-alice", {"service_tier": "interactive"}, {}, ("interactive", INTERACTIVE)),
        ("sk-alice", {"service_tier": "default"}, header, ("interactive", INTERACTIVE)),
        ("sk-alice", {"targets": {"tpot_ms": 20}}, header, ("", Targets(tpot=0.02))),
    ):
        reply = post(front, "/v1/chat/completions", CHAT | body, key, **headers)
        assert reply.status_code == 200, reply.text
        assert submitted(front) == found
        # Targets of its own replace those of its class, which the response names.
        assert reply.json()["service_tier"] == (found[0] or "interactive")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 20}),
        ("/v1/messages", CHAT),
        ("/api/generate", {"model": NAME, "prompt": "hello", "stream": False}),
        ("/completion", PROMPT),
    ],
)
def test_every_api_knows_classes(front: FrontEnd, path: str, body: dict[str, Any]) -> None:
    for headers, more in (({CLASS_HEADER: "interactive"}, {}), ({}, {"service_tier": "interactive"})):
        reply = post(front, path, body | more, **headers)
        assert reply.status_code == 200, reply.text
        assert submitted(front) == ("interactive", INTERACTIVE)


def test_unknown_classes_are_refused_with_the_known_ones(front: FrontEnd) -> None:
    known = "choose from interactive, batch, default"
    for key, body, headers in (
        ("sk-bob", {"service_tier": "gold"}, {}),
        ("sk-bob", {"service_tier": "priority"}, {}),
        ("sk-bob", {}, {CLASS_HEADER: ""}),
        ("sk-carol", {}, {}),
    ):
        reply = post(front, "/v1/chat/completions", CHAT | body, key, **headers)
        assert reply.status_code == 400
        assert known in reply.json()["error"]["message"]
    assert not front.engine.received


def test_without_classes_there_is_one_tier() -> None:
    with front_end() as front:
        for tier in ("priority", "flex", "default", None):
            assert post(front, "/v1/chat/completions", CHAT | {"service_tier": tier}).status_code == 200
            assert submitted(front) == ("", NO_TARGETS)
        for body, headers in (({"service_tier": "gold"}, {}), ({}, {CLASS_HEADER: "gold"})):
            reply = post(front, "/v1/chat/completions", CHAT | body, **headers)
            assert (reply.status_code, "has no classes" in reply.text) == (400, True)


def test_a_proxy_sends_the_class_of_its_clients_key() -> None:
    for service_class in ("batch", ""):
        sent = client_headers(APIKey("alice", b"\x01", service_class=service_class))
        state = state_of(x_api_key="proxy-key", **sent)
        assert isinstance(state, dict)
        assert state["api_key"].service_class == service_class


def configured(order: str, budget: str | None = None, **options: Any) -> ServerConfig:
    return server_config(ServerOptions(**options), "model", {"order": order, "budget": budget})


def test_the_workers_of_a_server_get_its_classes() -> None:
    config = configured("slack", classes=DECLARED)
    assert decode_config(encode_config(config)).classes == config.classes == CLASSES


@pytest.mark.parametrize(
    ("order", "budget", "classes", "problem"),
    [
        ("fcfs", None, ["a=ttft:5"], "no effect with order 'fcfs'; start with --order slack or edf"),
        ("fcfs", "knee", ["a=ttft:5"], "no effect with order 'fcfs'"),
        ("slack", None, ["a=ttft:5", "a=ttft:6"], "the same name twice"),
        ("slack", None, ["a=ttft:5,share:2"], "the share of 'a' is for simulations"),
        ("slack", None, ["auto=ttft:5"], "'auto' has a meaning of its own"),
        ("slack", None, ["a"], "must look like interactive=ttft:500,tpot:50"),
    ],
)
def test_classes_are_checked_before_anything_is_loaded(
    order: str, budget: str | None, classes: list[str], problem: str
) -> None:
    with pytest.raises(InvalidParameter, match="classes") as refusal:
        configured(order, budget, classes=classes)
    assert problem in str(refusal.value)


def test_a_key_file_with_an_unknown_class_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    with pytest.raises(InvalidParameter, match="'gold'; choose from interactive, batch, default"):
        configured("slack", classes=DECLARED, api_key_file=tmp_path / "keys.yaml")
    assert configured("fcfs", "slack", classes=DECLARED).classes == CLASSES


def test_the_metrics_say_which_targets_were_met(front: FrontEnd) -> None:
    for body in ({"service_tier": "interactive"}, {"targets": {"ttft_ms": 0.001, "e2e_ms": 50_000}}):
        assert post(front, "/v1/chat/completions", CHAT | body).status_code == 200
    counts = {
        tuple(sample.labels.values()): sample.value
        for family in front.service.metrics.families()
        for sample in family.samples
        if sample.name == "chairlift_request_targets_total"
    }
    assert counts == {
        ("interactive", "ttft", "in_time"): 1,
        ("interactive", "tpot", "in_time"): 1,
        ("interactive", "all", "in_time"): 1,
        ("own", "ttft", "late"): 1,
        ("own", "e2e", "in_time"): 1,
        ("own", "all", "late"): 1,
    }


@pytest.mark.parametrize(
    ("line", "judged"),
    [
        (Timeline(0.0, 0.1, 1.0, 3.0, 5, finish_reason="length"), {"ttft": True, "tpot": True, "e2e": True}),
        (Timeline(0.0, 0.1, 2.5, 3.0, 5, finish_reason="stop"), {"ttft": False, "tpot": True, "e2e": True}),
        (Timeline(0.0, 0.1, 1.0, 9.0, 5, finish_reason="stop"), {"ttft": True, "tpot": False, "e2e": True}),
        (Timeline(0.0, 0.1, 1.0, 1.0, 1, finish_reason="error"), {"ttft": True, "tpot": True, "e2e": False}),
        (Timeline(0.0, None, None, 0.0, 0, finish_reason="deadline"), {"ttft": False, "tpot": True, "e2e": False}),
        (Timeline(7.0, 7.1, None, 0.0, 0, finish_reason="length"), {"ttft": False, "tpot": True, "e2e": True}),
    ],
)
def test_a_completion_is_judged_by_its_times(line: Timeline, judged: dict[str, bool]) -> None:
    """Its end is at 9.5; one about its prompt alone has its answer there."""
    assert Targets(ttft=2.0, tpot=1.0, e2e=10.0).judge(line.latencies(9.5)) == judged


def test_attainment_is_counted_by_class() -> None:
    metrics = Metrics()
    metrics.record_targets("interactive", {"ttft": True, "tpot": False})
    assert metrics.values() == {
        "request_targets_total interactive ttft in_time": 1.0,
        "request_targets_total interactive tpot late": 1.0,
        "request_targets_total interactive all late": 1.0,
    }

"""Orderings, policies and tenants through the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from chairlift.server.access import KeySources, KeyTable
from chairlift.server.http.guards import HostNames, RequestGuard
from chairlift.server.metrics import Metrics
from chairlift.server.wire.limits import Limits
from tests.server.running_server import NAME, RunningServer, start_server


def complete(server: RunningServer, **more: object) -> tuple[int, dict[str, object]]:
    body = {"model": NAME, "prompt": "a chairlift", "max_tokens": 4, **more}
    reply = server.post("/v1/completions", body)
    return reply.status_code, reply.json()


def test_a_priority_is_refused_where_it_has_no_effect(server: RunningServer) -> None:
    status, body = complete(server, priority=1)
    assert status == 400
    assert body["error"]["param"] == "priority"  # type: ignore[index]
    assert complete(server, priority=0, user="alice")[0] == 200


def test_targets_are_refused_where_they_have_no_effect_or_are_none(server: RunningServer) -> None:
    for targets, parameter in (
        ({"ttft_ms": 500}, "targets"),
        ({"ttft_ms": 0}, "targets.ttft_ms"),
        ({"latency": 5}, "targets"),
        ({}, "targets"),
    ):
        status, body = complete(server, targets=targets)
        assert (status, body["error"]["param"]) == (400, parameter)  # type: ignore[index]
    assert complete(server, user="x" * 300)[0] == 400


@pytest.fixture(scope="module")
def batching(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ("--policy", "dynamic", "--max-delay-ms", "30", "--order", "priority", "--preemption", "swap")
    running = start_server(tiny_folder, tmp_path_factory.mktemp("batching") / "log", *options)
    yield running
    assert running.stop() == 0, running.tail()


@pytest.mark.parametrize("more", [{"priority": -5}, {"priority": 3, "n": 2}, {"user": "bob"}])
def test_a_server_with_dynamic_batches_answers_a_single_request(
    batching: RunningServer, more: dict[str, object]
) -> None:
    """It waits 30 ms for more requests, then runs the batch."""
    status, body = complete(batching, **more)
    assert status == 200, body
    assert all(choice["finish_reason"] for choice in body["choices"])  # type: ignore[attr-defined]
    batching.wait_idle()


@pytest.mark.parametrize(
    ("key", "tenant"), [("sk-1", "alice"), ("sk-2", "key-2"), ("sk-3", "Bob B"), ("alice sk-1", None), ("sk-4", None)]
)
def test_a_key_names_its_tenant(key: str, tenant: str | None) -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["tenant"])

    async def nothing(*_: object) -> Message:
        return {"type": "http.request", "body": b""}

    keys = ["alice sk-1", "sk-2", "  Bob B  sk-3 "]
    guards = RequestGuard(
        app, keys=KeyTable(KeySources(keys).read()), hosts=HostNames(), limits=Limits(), metrics=Metrics()
    )
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope: Scope = {"type": "http", "path": "/v1/models", "query_string": b"", "headers": headers, "method": "GET"}
    asyncio.run(guards(scope, nothing, nothing))  # type: ignore[arg-type]
    assert seen == ([] if tenant is None else [tenant])

"""A server behind a proxy that authenticates clients takes their names from it, and from nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey, KeySources, KeyTable
from chairlift.server.http.guards import HostNames, RequestGuard, client_headers
from chairlift.server.metrics import Metrics
from chairlift.server.wire.limits import Limits

CLIENT = client_headers(APIKey("Zoë 1", b"\x01\xff"))


def state_of(**headers: str) -> dict[str, Any] | int:
    """What the routes learn about a request with these headers, or the status of a refusal."""
    found: dict[str, Any] = {}
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.update(scope["state"])

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    keys = KeyTable(KeySources(["alice secret"], proxy="proxy-key").read())
    guard = RequestGuard(app, keys=keys, hosts=HostNames(), limits=Limits(), metrics=Metrics())
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/models", "query_string": b"", "headers": encoded}
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return found or statuses[0]


def test_the_proxy_names_its_client() -> None:
    state = state_of(x_api_key="proxy-key", **CLIENT)
    assert isinstance(state, dict)
    assert (state["tenant"], state["key"]) == ("Zoë 1", b"01ff")


def test_the_proxy_may_have_a_client_without_a_key() -> None:
    state = state_of(authorization="Bearer proxy-key")
    assert isinstance(state, dict)
    assert state["tenant"] == ""
    assert state["key"]


def test_other_clients_cannot_name_anyone() -> None:
    state = state_of(x_api_key="secret", **CLIENT)
    assert isinstance(state, dict)
    assert state["tenant"] == "alice"
    assert state_of(**CLIENT) == 401


def test_the_proxys_key_is_checked_like_others() -> None:
    with pytest.raises(InvalidParameter, match="proxy_key"):
        KeySources(proxy="a key").read()
    assert KeySources(proxy="key")

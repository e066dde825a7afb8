"""The metrics and the dashboard of a fleet, from replicas of which some are slow or dead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'chairlift[ray]'")

from aiohttp import web

from chairlift.cluster import monitoring
from chairlift.cluster.monitoring import FleetStream, fleet_exposition, merge_expositions
from chairlift.cluster.serving.routing_table import ReplicaInfo, ReplicaLoad, RoutingTable

EXPOSITION = b"""# HELP chairlift_requests_running requests in the batch
# TYPE chairlift_requests_running gauge
chairlift_requests_running 3.0
# HELP chairlift_requests_total completions
# TYPE chairlift_requests_total counter
chairlift_requests_total{reason="stop} of"} 7.0
"""
DEAD = "http://127.0.0.1:9"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def replica(path: str, answer: Answer) -> AsyncIterator[str]:
    """A server with one route; yields its address."""
    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def fleet_of(**addresses: str) -> RoutingTable:
    table = RoutingTable("least-loaded")
    update(table, addresses)
    return table


def update(table: RoutingTable, addresses: dict[str, str]) -> None:
    infos = {name: ReplicaInfo(address, "secret", 100, "1", 1, "node") for name, address in addresses.items()}
    table.update((name, info, ReplicaLoad(running=1)) for name, info in infos.items())


async def answer_metrics(request: web.Request) -> web.Response:
    assert request.headers["x-api-key"] == "secret"
    return web.Response(body=EXPOSITION)


# ---- metrics -----------------------------------------------------------------------------------------------------


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """The values by name and replica (or state)."""
    return {
        (sample.name, sample.labels.get("replica") or sample.labels["state"]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_series_of_all_replicas_are_joined_by_metric() -> None:
    merged = merge_expositions([("a", EXPOSITION), ('b"\\', EXPOSITION + b"# HELP new x\n# TYPE new gauge\nnew 1\n")])
    families = {family.name: family for family in text_string_to_metric_families(merged.decode())}
    assert list(families) == ["chairlift_requests_running", "chairlift_requests", "new"]
    assert merged.count(b"# TYPE chairlift_requests_running gauge") == 1
    found = [(sample.labels, sample.value) for sample in families["chairlift_requests"].samples]
    assert found == [
        ({"replica": "a", "reason": "stop} of"}, 7.0),
        ({"replica": 'b"\\', "reason": "stop} of"}, 7.0),
    ]
    assert families["new"].samples[0].labels == {"replica": 'b"\\'}


def test_a_dead_slow_or_huge_replica_does_not_fail_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "SECONDS", 0.5)
    monkeypatch.setattr(monitoring, "MAX_BYTES", 1000)

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def flood(_: web.Request) -> web.Response:
        return web.Response(body=EXPOSITION * 1000)

    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=500, body=EXPOSITION)

    async def check() -> bytes:
        async with AsyncExitStack() as stack:
            answers = {"good": answer_metrics, "slow": hang, "huge": flood, "broken": fail}
            addresses = {
                name: await stack.enter_async_context(replica("/metrics", one)) for name, one in answers.items()
            }
            return await fleet_exposition(fleet_of(dead=DEAD, **addresses))

    found = samples(asyncio.run(check()))
    up = {name: found["chairlift_fleet_replica_up", name] for name in ("good", "slow", "huge", "broken", "dead")}
    assert up == {"good": 1, "slow": 0, "huge": 0, "broken": 0, "dead": 0}
    assert found["chairlift_fleet_replicas", "ready"] == 5
    assert [key for key in found if key[0] == "chairlift_requests_running"] == [("chairlift_requests_running", "good")]


def test_a_fleet_without_replicas_has_metrics() -> None:
    found = samples(asyncio.run(fleet_exposition(fleet_of())))
    assert found == {("chairlift_fleet_replicas", state): 0 for state in ("ready", "restarting", "failing")}


# ---- dashboard ---------------------------------------------------------------------------------------------------


async def answer_frames(request: web.Request) -> web.StreamResponse:
    """Send two frames, of which the second comes in pieces, and a comment; then wait."""
    response = web.StreamResponse()
    await response.prepare(request)
    for piece in (b'data: {"t":"hello"}\n\n: ping\n\nda', b'ta: {"t":"key",', b'"slots":4}\n\n'):
        await response.write(piece)
        await asyncio.sleep(0.02)
    await asyncio.sleep(60)
    return response


async def read_until(events: AsyncIterator[bytes], done: Callable[[list[Any]], bool]) -> list[Any]:
    frames: list[Any] = []
    async with asyncio.timeout(20):
        while not done(frames):
            event = await anext(events)
            assert event.startswith(b"data: ")
            assert event.endswith(b"\n\n")
            frames.append(json.loads(event[6:]))
    return frames


def frames_of(frames: list[Any], name: str) -> list[Any]:
    return [frame["frame"] for frame in frames if frame["t"] == "replica" and frame["id"] == name]


def test_frames_of_all_replicas_come_over_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "FLEET_SECONDS", 0.05)
    monkeypatch.setattr(monitoring, "RETRY_SECONDS", 0.05)

    async def check() -> None:
        async with (
            replica("/dashboard/stream", answer_frames) as first,
            replica("/dashboard/stream", answer_frames) as second,
        ):
            fleet = fleet_of(a=first, dead=DEAD)
            events = FleetStream(fleet, "tiny").events()
            frames = await read_until(events, lambda frames: len(frames_of(frames, "a")) == 2)
            assert frames_of(frames, "a") == [{"t": "hello"}, {"t": "key", "slots": 4}]
            report = next(frame for frame in frames if frame["t"] == "fleet")
            assert (report["model"], report["router"], report["shown"]) == ("tiny", "least-loaded", ["a", "dead"])
            assert report["replicas"][0]["load"]["running"] == 1
            assert "key" not in report["replicas"][0]
            # A replica is added, and another one is removed.
            update(fleet, {"a": first, "b": second})
            frames = await read_until(events, lambda frames: len(frames_of(frames, "b")) == 2)
            last = await read_until(events, lambda frames: any(frame["t"] == "fleet" for frame in frames))
            assert last[-1]["shown"] == ["a", "b"]
            before = asyncio.all_tasks()
            await events.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) < len(before)

    asyncio.run(check())


def test_only_the_first_replicas_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "MAX_LIFTS", 1)

    async def check() -> list[Any]:
        events = FleetStream(fleet_of(b=DEAD, a=DEAD), "tiny").events()
        frames = await read_until(events, lambda frames: bool(frames))
        await events.aclose()  # type: ignore[attr-defined]
        return frames

    (report,) = asyncio.run(check())
    assert report["shown"] == ["a"]
    assert {one["id"] for one in report["replicas"]} == {"a", "b"}

"""The metrics and the dashboard of a fleet: those of all its replicas, together."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import aiohttp
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import chairlift
from chairlift.cluster.serving.routing_table import KnownReplica, RoutingTable
from chairlift.server.dashboard.page import content_policy, fleet_page
from chairlift.server.generation.reply import EventStream
from chairlift.server.http.dashboard import PATH, too_many_pages
from chairlift.server.http.guards import check_sees_all
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import unavailable

log = logging.getLogger("chairlift.cluster")

SECONDS = 2.0  # The time for a replica's answer; Prometheus waits for 10.
AT_ONCE = 64
MAX_BYTES = 4 * 2**20  # The limit for one replica.


async def fleet_exposition(fleet: RoutingTable, own: Metrics | None = None) -> bytes:
    """Return the fleet in Prometheus' text format. A replica that does not answer in time has only `…_replica_up` 0.

    `own` are the metrics of the ingress, which refuses requests before any replica sees them.
    """
    replicas, free = fleet.replicas(), asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        texts = await asyncio.gather(*(_read(session, free, replica) for replica in replicas))
    answers = list(zip(replicas, texts, strict=True))
    texts_by_name = [(replica.id, text) for replica, text in answers if text is not None]
    if own is not None:
        texts_by_name.append(("ingress", _refusals(own)))
    series = merge_expositions(texts_by_name)
    registry = CollectorRegistry(auto_describe=False)
    up = Gauge(
        "chairlift_fleet_replica_up", "Whether a replica's metrics could be read.", ["replica"], registry=registry
    )
    states = Gauge("chairlift_fleet_replicas", "Replicas by state.", ["state"], registry=registry)
    for state in ("ready", "restarting", "failing"):
        states.labels(state).set(0)
    for replica, text in answers:
        up.labels(replica.id).set(text is not None)
        states.labels(replica.state).inc()
    return generate_latest(registry) + series


def _refusals(own: Metrics) -> bytes:
    """Return the metrics of an ingress; all others describe an engine."""
    registry = CollectorRegistry(auto_describe=False)
    for counter in (own.refused, own.rate_limited):
        registry.register(counter)
    return generate_latest(registry)


async def _read(session: aiohttp.ClientSession, free: asyncio.Semaphore, replica: KnownReplica) -> bytes | None:
    """Return the text of a replica's /metrics; None if it does not answer."""
    async with free:
        try:
            async with session.get(replica.info.url("/metrics"), headers={"x-api-key": replica.info.key}) as found:
                text = await found.content.read(MAX_BYTES + 1)
                while len(text) <= MAX_BYTES and (more := await found.content.read(MAX_BYTES + 1)):
                    text += more
                if found.status == 200 and len(text) <= MAX_BYTES:
                    return text
                problem = f"status {found.status}, {len(text)} bytes"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = type(error).__name__
    log.warning("the metrics of the replica %s cannot be read (%s)", replica.id, problem)
    return None


def merge_expositions(expositions: Iterable[tuple[str, bytes]]) -> bytes:
    """Join texts of Prometheus' format, with the label `replica` for each line; lines of a metric stay together."""
    heads: dict[bytes, list[bytes]] = {}  # HELP and TYPE by the metric's name
    samples: dict[bytes, list[bytes]] = {}
    for replica, text in expositions:
        label = b'replica="%b"' % replica.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode()
        name, is_first = b"", False
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_first = name not in heads
                heads.setdefault(name, [])
                samples.setdefault(name, [])
            if line.startswith(b"#"):
                if is_first:
                    heads[name].append(line)
            elif line and name:  # other texts must not fail the page
                samples[name].append(_labelled(line, label))
    return b"".join(line + b"\n" for name, head in heads.items() for line in (*head, *samples[name]))


def _labelled(line: bytes, label: bytes) -> bytes:
    name, brace, rest = line.partition(b"{")
    if brace and b" " not in name:
        return b"%b{%b,%b" % (name, label, rest)
    name, _, value = line.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)


MAX_PAGES, MAX_PAGES_OF_KEY = 8, 4  # each reads every replica
MAX_LIFTS = 16  # replicas with frames; the others are only listed
FLEET_SECONDS = 1.0
RETRY_SECONDS = 1.0
MAX_UNREAD = 64  # events; a page that reads slowly makes the replicas wait, which drop frames for it
EVENT_END = b"\n\n"


def dashboard_routes(fleet: RoutingTable, model_name: str) -> list[Route]:
    """The page and its stream."""
    page = fleet_page()
    headers = {"Content-Security-Policy": content_policy(page), "Cache-Control": "no-cache"}
    open_pages: dict[FleetStream, str | None] = {}  # The values are the tenants of keys.

    async def dashboard(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def stream(request: Request) -> Response:
        check_sees_all(request.state)
        if len(open_pages) >= MAX_PAGES:
            raise unavailable(f"{MAX_PAGES} pages are open, which is the limit")
        tenant = request.state.tenant
        if tenant is not None and list(open_pages.values()).count(tenant) >= MAX_PAGES_OF_KEY:
            raise too_many_pages(f"{MAX_PAGES_OF_KEY} pages with this key")
        page_stream = FleetStream(fleet, model_name)
        open_pages[page_stream] = tenant
        return EventStream(page_stream.events(), on_end=lambda: open_pages.pop(page_stream, None))

    return [Route(PATH, dashboard), Route(f"{PATH}/stream", stream)]


class FleetStream:
    """The events of one page."""

    def __init__(self, fleet: RoutingTable, model_name: str) -> None:
        self._fleet = fleet
        self._model_name = model_name
        self._unread: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNREAD)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events until the page is closed."""
        feeding = asyncio.create_task(self._feed())
        try:
            while True:
                yield await self._unread.get()
        finally:
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding

    async def _feed(self) -> None:
        """Keep a reader for each of the first replicas, and report on all of them."""
        readers: dict[str, asyncio.Task[None]] = {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=RETRY_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                while True:
                    shown = {
                        one.id: one
                        for one in sorted(self._fleet.replicas(), key=lambda replica: replica.id)[:MAX_LIFTS]
                    }
                    for gone in readers.keys() - shown.keys():
                        readers.pop(gone).cancel()
                    for name in shown.keys() - readers.keys():
                        readers[name] = asyncio.create_task(self._follow(session, shown[name]))
                    await self._unread.put(self._report(list(shown)))
                    await asyncio.sleep(FLEET_SECONDS)
        finally:
            for task in readers.values():
                task.cancel()

    def _report(self, shown: list[str]) -> bytes:
        report = {
            "t": "fleet",
            "version": chairlift.__version__,
            "model": self._model_name,
            "shown": shown,
            "router": self._fleet.policy,
            "replicas": self._fleet.describe(),
        }
        return b"data: " + json.dumps(report).encode() + EVENT_END

    async def _follow(self, session: aiohttp.ClientSession, replica: KnownReplica) -> None:
        """Pass on the frames of a replica; connect again while it is part of the fleet."""
        headers = {"x-api-key": replica.info.key}
        opening = b'data: {"t":"replica","id":%b,"frame":' % json.dumps(replica.id).encode()
        while True:
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(replica.info.url(f"{PATH}/stream"), headers=headers) as response:
                    rest = b""
                    async for piece in response.content.iter_any():
                        *events, rest = (rest + piece).split(EVENT_END)
                        for event in events:
                            if event.startswith(b"data: "):
                                await self._unread.put(opening + event[6:] + b"}" + EVENT_END)
            await asyncio.sleep(RETRY_SECONDS)

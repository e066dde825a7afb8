"""The dashboard of a fleet: the frames of all replicas over one connection, since browsers open only six.

{"t": "fleet", "replicas": […]}                  once per second: states and loads
{"t": "replica", "id": "…", "frame": {…}}        a frame of a replica's own dashboard (docs/dashboard.md)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import chairlift
from chairlift.cluster.serving.fleet import FleetView
from chairlift.cluster.serving.routing_table import KnownReplica
from chairlift.server.dashboard.page import content_policy, fleet_page
from chairlift.server.dashboard.routes import PATH
from chairlift.server.http.errors import unavailable
from chairlift.server.http.guards import check_sees_all
from chairlift.server.http.sse import EventStream

MAX_PAGES = 8  # each reads every replica
MAX_LIFTS = 16  # replicas with frames; the others are only listed
FLEET_SECONDS = 1.0
RETRY_SECONDS = 1.0
MAX_UNREAD = 64  # events; a page that reads slowly makes the replicas wait, which drop frames for it
EVENT_END = b"\n\n"


def dashboard_routes(fleet: FleetView, model_name: str) -> list[Route]:
    """The page and its stream."""
    page = fleet_page()
    headers = {"Content-Security-Policy": content_policy(page), "Cache-Control": "no-cache"}
    open_pages: set[FleetStream] = set()

    async def dashboard(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def stream(request: Request) -> Response:
        check_sees_all(request.state)
        if len(open_pages) >= MAX_PAGES:
            raise unavailable(f"{MAX_PAGES} pages are open, which is the limit")
        found = FleetStream(fleet, model_name)
        open_pages.add(found)
        return EventStream(found.events(), on_end=lambda: open_pages.discard(found))

    return [Route(PATH, dashboard), Route(f"{PATH}/stream", stream)]


class FleetStream:
    """The events of one page."""

    def __init__(self, fleet: FleetView, model_name: str) -> None:
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
                    shown = {one.id: one for one in sorted(self._fleet.replicas(), key=_order)[:MAX_LIFTS]}
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
        report = {"t": "fleet", "version": chairlift.__version__, "model": self._model_name, "shown": shown}
        return _event(report | {"router": self._fleet.router, "replicas": self._fleet.describe()})

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


def _order(replica: KnownReplica) -> str:
    return replica.id


def _event(fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + EVENT_END

"""The dashboard: its routes, and the open pages, which read the engine's frames independently of each other. The page
itself needs no API key; its data does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.requests import Request

from chairlift.core.policies.base import make_policy
from chairlift.server.dashboard.page import content_policy, dashboard_page
from chairlift.server.generation.endpoint import RequestBody
from chairlift.server.generation.reply import EventStream
from chairlift.server.generation.usage import RequestTexts
from chairlift.server.http.guards import check_sees_all
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EnginePort
from chairlift.server.wire.errors import APIError, unavailable
from chairlift.server.wire.messages import DashboardFrame, Loaded, RecorderFault, RecordSteps, SwitchPolicy

log = logging.getLogger("chairlift.server")

PATH = "/dashboard"
MAX_UNREAD = 50  # frames that a page may leave unread; there are about ten per second
MAX_FRAMES = MAX_UNREAD // 2 - 1  # leaves a page that gets all of these room for as many more
MAX_BYTES = 2**20  # total size of the frames after the keyframe


class RecentFrames:
    def __init__(self) -> None:
        self._frames: list[DashboardFrame] = []  # starts with a keyframe; empty if there is none or it is too old
        self._size = 0

    def add(self, frame: DashboardFrame) -> None:
        if frame.is_key:
            self._frames, self._size = [frame], 0
        elif self._frames:
            self._frames.append(frame)
            self._size += len(frame.json)
            if len(self._frames) > MAX_FRAMES or self._size > MAX_BYTES:
                self.clear()

    def clear(self) -> None:
        self._frames, self._size = [], 0

    def all(self) -> Sequence[DashboardFrame]:
        return self._frames


MAX_SUBSCRIBERS = 32
MAX_SUBSCRIBERS_OF_KEY = 8
MAX_UNREAD_BYTES = 4 * 2**20
SERVICE_SECONDS = 1.0
LEASE_SECONDS = 10.0  # the engine stops recording this long after the last RecordSteps message
SAFE_LEASE_SECONDS = 0.8 * LEASE_SECONDS  # It still records within this time, even if the message was delayed.

Text = dict[str, str | bool]
FindText = Callable[[str, bytes | None], Awaitable[Text | None]]

_encode = msgspec.json.Encoder().encode


class Subscriber:
    """One open page. If it reads too slowly, its unread frames are dropped and it continues at the next keyframe."""

    def __init__(self, key: bytes | None, tenant: str | None) -> None:
        self.key = key
        self.tenant = tenant  # tenant name of the API key, if there are keys
        self.num_lost = 0
        self.synced = False  # whether it got a keyframe and every frame since
        self.wakeup = asyncio.Event()
        self._unread: deque[list[bytes]] = deque()  # the messages for each frame
        self._size = 0
        self._ever_synced = False

    def offer(self, frame: DashboardFrame) -> None:
        """Queue a new frame, unless too much is unread."""
        if not self.synced and not frame.is_key:
            self.num_lost += self._ever_synced
        elif len(self._unread) >= MAX_UNREAD or self._size > MAX_UNREAD_BYTES:
            self.num_lost += len(self._unread) + 1
            self._drop_unread()
            self.synced = False
        else:
            self._size += self._queue(frame)

    def catch_up(self, recent: Iterable[DashboardFrame]) -> None:
        """Queue the last keyframe and the frames after it, without a limit: these are in memory anyway."""
        for frame in recent:
            self._queue(frame)

    def _queue(self, frame: DashboardFrame) -> int:
        """Queue a frame and return its size in bytes."""
        messages = []
        if self._ever_synced and not self.synced:
            messages.append(self.lost_frame())
        if frame.tenants:
            names = {str(number): name for number, name in frame.tenants.items()}
            messages.append(_encode({"t": "tenants", "names": names}))
        messages.append(frame.json)
        self.synced = self._ever_synced = True
        self._unread.append(messages)
        self.wakeup.set()
        return sum(map(len, messages))

    def lost_frame(self) -> bytes:
        return _encode({"t": "lost", "frames": self.num_lost})

    def _drop_unread(self) -> None:
        self._unread.clear()
        self._size = 0

    def take_unread(self) -> list[bytes]:
        unread = [data for messages in self._unread for data in messages]
        self._drop_unread()
        self.wakeup.clear()
        return unread


class Subscribers:
    def __init__(
        self, engine: EnginePort, metrics: Metrics, texts: RequestTexts, *, greeting: Callable[[], dict[str, Any]]
    ) -> None:
        self.engine = engine
        self._metrics = metrics
        self.texts = texts
        self._greeting = greeting  # the first message to every page
        self._subscribers: set[Subscriber] = set()
        self._watched_elsewhere = False  # whether other HTTP processes have open pages
        self.find_elsewhere: FindText | None = None  # texts of other HTTP processes
        self._keyframe_requested = self._lease_renewed = float("-inf")
        self._service: tuple[float, bytes] = (float("-inf"), b"")
        self._closed = False
        self._recent = RecentFrames()
        self._recent_from: Loaded | None = None  # engine process that sent the recent frames
        self._recorder_off_in: Loaded | None = None  # engine process with its recorder switched off
        engine.on_frame = self.receive

    def set_watched_elsewhere(self, on: bool) -> None:
        self._watched_elsewhere = on
        self._note_watching()

    def _note_watching(self) -> None:
        self.texts.is_watched = bool(self._subscribers) or self._watched_elsewhere
        if not self.texts.is_watched:
            self.texts.clear()

    async def find_text(self, request_id: str, key: bytes | None) -> Text | None:
        """Return the texts of a request; None if they are not kept or belong to another key."""
        found = self.texts.find(request_id, key)
        return found or (self.find_elsewhere and await self.find_elsewhere(request_id, key))

    def close(self) -> None:
        """End all streams, because the server is shutting down."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.wakeup.set()

    @property
    def is_recording(self) -> bool:
        """Whether the engine's recorder is on; after too many failures it is off until the engine is restarted."""
        return self._recorder_off_in is None or self._recorder_off_in is not self.engine.loaded

    def receive(self, message: DashboardFrame | RecorderFault) -> None:
        """Handle a message of the engine. Never raises, since the caller also delivers the engine's updates."""
        try:
            if isinstance(message, DashboardFrame):
                self._recent.add(message)
                self._recent_from = self.engine.loaded
                for subscriber in self._subscribers:
                    subscriber.offer(message)
                return
            self._metrics.recorder_faults.inc()
            self._recent.clear()
            if message.is_off:
                self._recorder_off_in = self.engine.loaded
        except Exception:
            log.exception("a frame could not be passed on to the dashboard's pages")
            for subscriber in self._subscribers:
                subscriber.synced = False

    def subscribe(self, key: bytes | None, tenant: str | None) -> Subscriber:
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise too_many_pages(f"{MAX_SUBSCRIBERS} pages")
        # The ingress of a fleet has no tenant of its own, and limits the pages of keys itself.
        if tenant and sum(one.tenant == tenant for one in self._subscribers) >= MAX_SUBSCRIBERS_OF_KEY:
            raise too_many_pages(f"{MAX_SUBSCRIBERS_OF_KEY} pages with this key")
        subscriber = Subscriber(key, tenant)
        self._subscribers.add(subscriber)
        self._note_watching()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)
        self._note_watching()

    async def stream(self, subscriber: Subscriber) -> AsyncIterator[bytes]:
        """Yield the page's server-sent events until it is closed."""
        yield _event(_encode({"t": "hello", **self._greeting(), "tenant": subscriber.tenant}))
        service_sent = float("-inf")
        while not self._closed:
            self._keep_recording(subscriber)
            if time.monotonic() - service_sent >= SERVICE_SECONDS:
                service_sent = time.monotonic()
                yield _event(self._service_frame()) + _event(subscriber.lost_frame())
            with suppress(TimeoutError):
                await asyncio.wait_for(subscriber.wakeup.wait(), SERVICE_SECONDS)
            if unread := subscriber.take_unread():
                yield b"".join(map(_event, unread))

    def _keep_recording(self, subscriber: Subscriber) -> None:
        """Renew the engine's lease and request a keyframe if the page needs one."""
        now = time.monotonic()
        if now - self._lease_renewed > SAFE_LEASE_SECONDS or self._recent_from is not self.engine.loaded:
            self._recent.clear()  # the engine may have stopped recording or restarted since
        if not subscriber.synced:
            subscriber.catch_up(self._recent.all())
        keyframe = not subscriber.synced and self.is_recording and now - self._keyframe_requested > SERVICE_SECONDS / 2
        if keyframe or now - self._lease_renewed > LEASE_SECONDS / 4:
            self._lease_renewed = now
            self._keyframe_requested = now if keyframe else self._keyframe_requested
            self.engine.send(RecordSteps(LEASE_SECONDS, keyframe=keyframe))

    def _service_frame(self) -> bytes:
        """The numbers of /metrics, encoded once for all pages."""
        made, frame = self._service
        if time.monotonic() - made >= SERVICE_SECONDS / 2:
            state, is_off = self.engine.state.value, not self.is_recording
            totals = {"t": "service", "engine": state, "open": self.engine.num_open, "recorder_off": is_off}
            frame = _encode(totals | {"metrics": self._metrics.values()})
            self._service = time.monotonic(), frame
        return frame


def too_many_pages(pages: str) -> APIError:
    problem = f"{pages} look at the dashboard already, and there is room for no more; close one"
    return APIError(429, problem, type_="rate_limit_error", code="too_many_viewers")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class PolicyRequest(RequestBody):
    policy: str
    max_delay_ms: float | None = None  # how long a static or dynamic batch waits to be filled


def add_dashboard_routes(app: FastAPI, subscribers: Subscribers, *, policy_switch: bool) -> None:
    page = dashboard_page()
    headers = {"Content-Security-Policy": content_policy(page), "Cache-Control": "no-cache"}

    @app.get(PATH, include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers=headers)

    @app.get(f"{PATH}/stream", include_in_schema=False)
    async def stream(http: Request) -> Response:
        check_sees_all(http.state)
        subscriber = subscribers.subscribe(http.state.key, http.state.tenant)
        return EventStream(subscribers.stream(subscriber), on_end=lambda: subscribers.unsubscribe(subscriber))

    @app.get(f"{PATH}/requests/{{request_id}}", include_in_schema=False)
    async def texts(request_id: str, http: Request) -> dict[str, Any]:
        found = await subscribers.find_text(request_id, http.state.key)
        if found is None:
            raise APIError(404, "no text of that request is kept, or it was sent with another key", code="not_found")
        return found

    @app.post(f"{PATH}/policy", include_in_schema=False)
    async def switch_policy(body: PolicyRequest, http: Request) -> Response:
        check_sees_all(http.state)
        if not policy_switch:
            raise APIError(403, "this server was not started with --policy-switch", code="not_allowed")
        make_policy(body.policy, body.max_delay_ms)  # validates the name and the delay
        if not subscribers.engine.send(SwitchPolicy(body.policy, body.max_delay_ms)):
            raise unavailable(f"the engine is {subscribers.engine.state.value}")
        return JSONResponse({"policy": body.policy})

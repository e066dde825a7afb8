"""Those who look at the dashboard: each gets the engine's frames at its own pace, and nobody waits for any of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from chairlift.server.dashboard.recent_frames import MAX_UNREAD, RecentFrames
from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.http.errors import APIError
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient
from chairlift.server.process.messages import Frame, Loaded, RecorderFault, Watch

log = logging.getLogger("chairlift.server")

MAX_SUBSCRIBERS = 32
MAX_UNREAD_BYTES = 4 * 2**20
SERVICE_SECONDS = 1.0
LEASE_SECONDS = 10.0  # the engine stops recording when it has not been asked for so long
SURE_SECONDS = 0.8 * LEASE_SECONDS  # so long it certainly goes on, however long a message takes

_encode = msgspec.json.Encoder().encode


class Subscriber:
    """One open page. If it reads too slowly it loses what it has not read, and goes on from the next keyframe."""

    def __init__(self, key: bytes | None, tenant: str | None) -> None:
        self.key = key
        self.tenant = tenant  # what the owner of the key is called, if there are keys
        self.num_lost = 0
        self.synced = False  # a keyframe has come, and every frame since
        self.news = asyncio.Event()
        self._unread: deque[list[bytes]] = deque()  # what there is to say for each frame
        self._size = 0
        self._ever_synced = False

    def offer(self, frame: Frame, tenants: dict[int, str]) -> None:
        """Tell it a frame that has just come, unless it has too much to read already."""
        if not self.synced and not frame.is_key:
            self.num_lost += self._ever_synced
        elif len(self._unread) >= MAX_UNREAD or self._size > MAX_UNREAD_BYTES:
            self.num_lost += len(self._unread) + 1
            self._forget()
            self.synced = False
        else:
            self._size += self._tell(frame, tenants)

    def catch_up(self, recent: Iterable[tuple[Frame, dict[int, str]]]) -> None:
        """Tell it the last keyframe and what came after it. That is never too much: it comes at once, before the page
        can read any of it, and it is kept for all pages anyway."""
        for frame, tenants in recent:
            self._tell(frame, tenants)

    def _tell(self, frame: Frame, tenants: dict[int, str]) -> int:
        """Returns how many bytes that makes."""
        said = []
        if self._ever_synced and not self.synced:
            said.append(self.lost_frame())
        if tenants:
            said.append(_encode({"t": "tenants", "names": {str(number): name for number, name in tenants.items()}}))
        said.append(frame.json)
        self.synced = self._ever_synced = True
        self._unread.append(said)
        self.news.set()
        return sum(map(len, said))

    def lost_frame(self) -> bytes:
        return _encode({"t": "lost", "frames": self.num_lost})

    def _forget(self) -> None:
        self._unread.clear()
        self._size = 0

    def take(self) -> list[bytes]:
        unread = [data for said in self._unread for data in said]
        self._forget()
        self.news.clear()
        return unread


class Subscribers:
    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        texts: RequestTexts,
        *,
        greeting: Callable[[], dict[str, Any]],
        isolate_keys: bool = False,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self.texts = texts
        self._greeting = greeting  # what never changes while the server runs
        self._isolate_keys = isolate_keys
        self._viewers: set[Subscriber] = set()
        self._asked_for_key = self._renewed = float("-inf")
        self._service: tuple[float, bytes] = (float("-inf"), b"")
        self._closed = False
        self._recent = RecentFrames()
        self._life: Loaded | None = None  # of the engine that they are from
        self._failed_in: Loaded | None = None  # the life of the engine in which its recorder has switched itself off
        engine.on_frame = self.take_in

    @property
    def watching(self) -> bool:
        return bool(self._viewers)

    def close(self) -> None:
        """Let every page go; the server is shutting down."""
        self._closed = True
        for viewer in self._viewers:
            viewer.news.set()

    @property
    def is_recording(self) -> bool:
        """False if the engine's recorder failed too often, until the engine is started again."""
        return self._failed_in is None or self._failed_in is not self._engine.loaded

    def take_in(self, message: Frame | RecorderFault) -> None:
        """Whatever fails in here, the answers that come from the same engine are more important."""
        try:
            if isinstance(message, RecorderFault):
                self._note_fault(message)
            else:
                self._pass_on(message)
        except Exception:
            log.exception("a frame could not be passed on to the dashboard's pages")
            for viewer in self._viewers:
                viewer.synced = False

    def _pass_on(self, frame: Frame) -> None:
        self._recent.add(frame)
        self._life = self._engine.loaded
        for viewer in self._viewers:
            viewer.offer(frame, self._names_for(viewer, frame.tenants))

    def _note_fault(self, fault: RecorderFault) -> None:
        self._metrics.recorder_faults.inc()
        self._recent.clear()
        if fault.is_off:
            self._failed_in = self._engine.loaded

    def _names_for(self, viewer: Subscriber, tenants: dict[int, str]) -> dict[int, str]:
        """With isolated keys, nobody learns who the others are."""
        if not self._isolate_keys:
            return tenants
        return {number: name if name == viewer.tenant else f"key {number + 1}" for number, name in tenants.items()}

    def admit(self, key: bytes | None, tenant: str | None) -> Subscriber:
        if len(self._viewers) >= MAX_SUBSCRIBERS:
            problem = f"{MAX_SUBSCRIBERS} pages look at the dashboard already, and there is room for no more; close one"
            raise APIError(429, problem, type_="rate_limit_error", code="too_many_viewers")
        viewer = Subscriber(key, tenant)
        self._viewers.add(viewer)
        return viewer

    def dismiss(self, viewer: Subscriber) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self.texts.clear()

    async def stream(self, viewer: Subscriber) -> AsyncIterator[bytes]:
        """Server-sent events, for as long as the page is there."""
        yield _event(_encode({"t": "hello", **self._greeting(), "tenant": viewer.tenant}))
        told_service = float("-inf")
        while not self._closed:
            self._keep_watching(viewer)
            if time.monotonic() - told_service >= SERVICE_SECONDS:
                told_service = time.monotonic()
                yield _event(self._service_frame()) + _event(viewer.lost_frame())
            with suppress(TimeoutError):
                await asyncio.wait_for(viewer.news.wait(), SERVICE_SECONDS)
            if unread := viewer.take():
                yield b"".join(map(_event, unread))

    def _keep_watching(self, viewer: Subscriber) -> None:
        now = time.monotonic()
        if now - self._renewed > SURE_SECONDS or self._life is not self._engine.loaded:
            self._recent.clear()  # the engine may have stopped since, or is another one
        if not viewer.synced:
            viewer.catch_up((frame, self._names_for(viewer, frame.tenants)) for frame in self._recent.all())
        wants_key = not viewer.synced and self.is_recording and now - self._asked_for_key > SERVICE_SECONDS / 2
        if wants_key or now - self._renewed > LEASE_SECONDS / 4:
            self._renewed = now
            self._asked_for_key = now if wants_key else self._asked_for_key
            self._engine.tell(Watch(LEASE_SECONDS, keyframe=wants_key))

    def _service_frame(self) -> bytes:
        """The same numbers as /metrics has, for all pages at once."""
        made, frame = self._service
        if time.monotonic() - made >= SERVICE_SECONDS / 2:
            state, is_off = self._engine.state.value, not self.is_recording
            totals = {"t": "service", "engine": state, "open": self._engine.num_open, "recorder_off": is_off}
            frame = _encode(totals | {"metrics": self._metrics.values()})
            self._service = time.monotonic(), frame
        return frame


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

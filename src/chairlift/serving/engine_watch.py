"""The engine process's side of the dashboard: records steps while somebody watches, and sends frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from chairlift.core.events import Event
from chairlift.dashboard.recorder import Frame as Record
from chairlift.dashboard.recorder import Recorder
from chairlift.serving.messages import Frame, Watch

if TYPE_CHECKING:
    from chairlift.execution.engine import Engine

FRAME_SECONDS = 0.1  # between frames: what an eye calls live
QUIET_SECONDS = 1.0  # the same while nothing happens
MOST_OF_THE_TIME = 0.003  # that the engine makes frames; where they are large, there are fewer of them

_encoder = msgspec.json.Encoder()


class EngineWatch:
    def __init__(self, engine: Engine, send: Callable[[Frame], None]) -> None:
        self._engine = engine
        self._send = send
        self._recorder = Recorder(engine.scheduler)
        self._is_new = True
        self._happened = False  # anything, since the last frame
        self._last_frame = 0.0
        self._pause = FRAME_SECONDS  # until the next frame
        self._ends = 0.0

    def go_on(self, wanted: Watch) -> None:
        self._ends = time.monotonic() + wanted.seconds
        if self._is_new or wanted.keyframe:
            if not self._is_new:
                self._tell(self._recorder.frame(self._engine.now()))
            self._is_new = False
            self._tell(self._recorder.keyframe(self._engine.now(), time.time()), is_key=True)

    def take(self, events: Sequence[Event]) -> None:
        self._happened = True
        self._recorder.take(events)

    def tell(self) -> bool:
        """Send a frame if it is time for one. False if nobody watches any more."""
        now = time.monotonic()
        if now > self._ends:
            self._recorder.stop()
            return False
        if now - self._last_frame >= (self._pause if self._happened else QUIET_SECONDS):
            begun = time.thread_time()
            self._tell(self._recorder.frame(self._engine.now()))
            cost = time.thread_time() - begun
            self._pause = min(QUIET_SECONDS, max(FRAME_SECONDS, cost / MOST_OF_THE_TIME))
        return True

    def _tell(self, record: Record, *, is_key: bool = False) -> None:
        self._happened = False
        self._last_frame = time.monotonic()
        tenants = self._recorder.new_tenants(all_of_them=is_key)
        self._send(Frame(_encoder.encode(record), is_key, tenants))

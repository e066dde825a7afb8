"""The engine process's side of the dashboard: records steps while somebody watches, and sends frames.

Whatever goes wrong in here stays in here. A fault is counted and told, and the recorder begins anew; after too many of
them in a short time it stays off for as long as the engine runs. No request ever notices.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from chairlift.core.events import Event
from chairlift.server.dashboard.recorder import Frame as Record
from chairlift.server.dashboard.recorder import Recorder
from chairlift.server.process.messages import Frame, RecorderFault, Watch

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

log = logging.getLogger("chairlift")

FRAME_SECONDS = 0.1  # between frames: what an eye calls live
QUIET_SECONDS = 1.0  # the same while nothing happens
MOST_OF_THE_TIME = 0.003  # that the engine makes frames; where they are large there are fewer, down to one a second
KEY_SECONDS = 0.5  # between keyframes, at least ...
MOST_FOR_KEYS = 0.01  # ... and as long as it takes to spend no more of the engine's time on them than this
MOST_FAULTS = 3
FAULT_SECONDS = 60.0  # so many in such a time, and it is switched off

_encoder = msgspec.json.Encoder()


class FramePublisher:
    def __init__(self, engine: Engine, send: Callable[[Frame | RecorderFault], None]) -> None:
        self._engine = engine
        self._send = send
        self._recorder: Recorder | None = None  # while somebody watches
        self._wants_key = False
        self._happened = False  # anything, since the last frame
        self._last_frame = 0.0
        self._pause = FRAME_SECONDS  # until the next frame
        self._next_key = 0.0
        self._ends = 0.0
        self._faults: deque[float] = deque(maxlen=MOST_FAULTS)  # when the last of them were
        self._is_off = False

    def go_on(self, wanted: Watch) -> None:
        self._ends = time.monotonic() + wanted.seconds
        self._wants_key |= wanted.keyframe

    def take(self, events: Sequence[Event]) -> None:
        """What happened in a step."""
        if self._recorder is None:
            return
        try:
            self._recorder.take(events)
            self._happened = True
        except Exception:
            self._note_fault()

    def tell(self) -> None:
        """Send a frame if it is time for one."""
        if self._is_off or (self._recorder is None and not self._is_watched()):
            return
        try:
            self._tell_what_is_due()
        except Exception:
            self._note_fault()

    def _is_watched(self) -> bool:
        return time.monotonic() <= self._ends

    def _tell_what_is_due(self) -> None:
        if not self._is_watched():
            self._stop()
        elif (self._recorder is None or self._wants_key) and time.monotonic() >= self._next_key:
            self._tell_everything()
        elif self._recorder is not None and time.monotonic() - self._last_frame >= self._wait:
            begun = time.thread_time()
            self._tell(self._recorder, self._recorder.frame(self._engine.now()))
            cost = time.thread_time() - begun
            self._pause = min(QUIET_SECONDS, max(FRAME_SECONDS, cost / MOST_OF_THE_TIME))

    @property
    def _wait(self) -> float:
        """From one frame to the next."""
        return self._pause if self._happened else QUIET_SECONDS

    def _tell_everything(self) -> None:
        self._wants_key = False
        begun = time.thread_time()
        if self._recorder is None:
            self._recorder = Recorder(self._engine.scheduler)
        else:  # pages that go on need what happened until now
            self._tell(self._recorder, self._recorder.frame(self._engine.now()))
        self._tell(self._recorder, self._recorder.keyframe(self._engine.now(), time.time()), is_key=True)
        cost = time.thread_time() - begun
        self._next_key = time.monotonic() + max(KEY_SECONDS, cost / MOST_FOR_KEYS)

    def _tell(self, recorder: Recorder, record: Record, *, is_key: bool = False) -> None:
        self._happened = False
        self._last_frame = time.monotonic()
        tenants = recorder.new_tenants(all_of_them=is_key)
        self._send(Frame(_encoder.encode(record), is_key, tenants))

    def _stop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()

    def _note_fault(self) -> None:
        """What it has noted so far may be wrong: it begins anew, with the next keyframe."""
        log.exception("the dashboard's recorder failed; requests are not affected")
        with suppress(Exception):
            self._stop()
        self._faults.append(time.monotonic())
        is_often = len(self._faults) == MOST_FAULTS and self._faults[-1] - self._faults[0] < FAULT_SECONDS
        self._is_off = self._is_off or is_often
        self._send(RecorderFault(self._is_off))

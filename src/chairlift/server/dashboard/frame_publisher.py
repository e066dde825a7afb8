"""The engine process's side of the dashboard: records steps and sends frames while a page is open.

Errors in the recorder never affect requests. They are counted and reported, and the recorder is restarted; after too
many errors in a short time it stays off until the engine is restarted.
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
from chairlift.core.snapshot import SchedulerObserver
from chairlift.server.dashboard.recorder import SHOWN_WAITING, FrameData, StepRecorder
from chairlift.server.wire.messages import DashboardFrame, RecorderFault, RecordSteps

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

log = logging.getLogger("chairlift")

FRAME_SECONDS = 0.1  # between frames: short enough to look live
IDLE_FRAME_SECONDS = 1.0  # between frames while no steps run
MAX_FRAME_SHARE = 0.003  # Share of the engine's time; large frames are sent less often, down to one per second
MIN_KEYFRAME_SECONDS = 0.5  # between keyframes
MAX_KEYFRAME_SHARE = 0.01  # Share of the engine's time; large keyframes are sent less often
MAX_FAULTS = 3  # within FAULT_SECONDS; then the recorder is switched off
FAULT_SECONDS = 60.0

_encoder = msgspec.json.Encoder()


class FramePublisher:
    def __init__(self, engine: Engine, send: Callable[[DashboardFrame | RecorderFault], None]) -> None:
        self._engine = engine
        self._send = send
        self._recorder: StepRecorder | None = None  # None while no page is open
        self._keyframe_wanted = False
        self._has_news = False  # whether events were recorded since the last frame
        self._last_frame = 0.0
        self._interval = FRAME_SECONDS
        self._next_keyframe = 0.0
        self._lease_ends = 0.0
        self._faults: deque[float] = deque(maxlen=MAX_FAULTS)  # times of the last faults
        self._is_off = False

    def extend_lease(self, lease: RecordSteps) -> None:
        self._lease_ends = time.monotonic() + lease.seconds
        self._keyframe_wanted |= lease.keyframe

    def record(self, events: Sequence[Event]) -> None:
        """Record the events of one step."""
        if self._recorder is None:
            return
        try:
            self._recorder.record(events)
            self._has_news = True
        except Exception:
            self._handle_fault()

    def publish_if_due(self) -> None:
        if self._is_off or (self._recorder is None and not self._has_lease()):
            return
        try:
            self._publish_if_due()
        except Exception:
            self._handle_fault()

    def _has_lease(self) -> bool:
        return time.monotonic() <= self._lease_ends

    def _publish_if_due(self) -> None:
        if not self._has_lease():
            self._stop()
        elif (self._recorder is None or self._keyframe_wanted) and time.monotonic() >= self._next_keyframe:
            self._publish_keyframe()
        elif self._recorder is not None and time.monotonic() - self._last_frame >= self._frame_interval:
            begun = time.thread_time()
            self._publish(self._recorder, self._recorder.frame(self._engine.now()))
            cost = time.thread_time() - begun
            self._interval = min(IDLE_FRAME_SECONDS, max(FRAME_SECONDS, cost / MAX_FRAME_SHARE))

    @property
    def _frame_interval(self) -> float:
        return self._interval if self._has_news else IDLE_FRAME_SECONDS

    def _publish_keyframe(self) -> None:
        self._keyframe_wanted = False
        begun = time.thread_time()
        if self._recorder is None:
            self._recorder = StepRecorder(SchedulerObserver(self._engine.scheduler, SHOWN_WAITING))
        else:  # pages in sync need the events before the keyframe
            self._publish(self._recorder, self._recorder.frame(self._engine.now()))
        self._publish(self._recorder, self._recorder.keyframe(self._engine.now(), time.time()), is_key=True)
        cost = time.thread_time() - begun
        self._next_keyframe = time.monotonic() + max(MIN_KEYFRAME_SECONDS, cost / MAX_KEYFRAME_SHARE)

    def _publish(self, recorder: StepRecorder, frame: FrameData, *, is_key: bool = False) -> None:
        self._has_news = False
        self._last_frame = time.monotonic()
        tenants = recorder.take_tenant_names(all_of_them=is_key)
        self._send(DashboardFrame(_encoder.encode(frame), is_key, tenants))

    def _stop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()

    def _handle_fault(self) -> None:
        """Discard the recorder, whose state may be wrong; the next keyframe starts another one."""
        log.exception("the dashboard's recorder failed; requests are not affected")
        with suppress(Exception):
            self._stop()
        self._faults.append(time.monotonic())
        too_often = len(self._faults) == MAX_FAULTS and self._faults[-1] - self._faults[0] < FAULT_SECONDS
        self._is_off = self._is_off or too_often
        self._send(RecorderFault(self._is_off))

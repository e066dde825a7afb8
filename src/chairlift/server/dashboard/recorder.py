"""Records the engine's steps as compact frames for the live page.

The engine waits while this runs, so the work per step is small. Most steps decode the next token of the same requests:
a decoding request is recorded as one *run* of many steps, and a step with the same requests as the last one costs one
comparison of two lists. Frames therefore grow with the requests plus the steps, not with their product.
docs/dashboard.md describes the frames.

Errors in the recorder never affect requests. They are counted and reported, and the recorder is restarted; after too
many errors in a short time it stays off until the engine is restarted.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from chairlift.core.events import (
    BudgetDecided,
    DraftsVerified,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    StepDone,
    TextProduced,
    TokenProduced,
)
from chairlift.core.plan import Chunk, StepLimits, StepPlan
from chairlift.core.request import Request, Status
from chairlift.core.snapshot import BlockState, SchedulerObserver, SchedulerSnapshot
from chairlift.server.wire.messages import DashboardFrame, RecorderFault, RecordSteps

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine


FrameData = dict[str, Any]

FORMAT = 1
SHOWN_WAITING = 60  # waiting requests listed in a frame; all are counted
UNKNOWN = -1  # `num_sent` of a table that did not only grow
_FREQUENT = frozenset({TokenProduced, TextProduced})  # hundreds per step


@dataclass(slots=True, eq=False)
class _Known:
    """A request that was announced to the page."""

    handle: int  # identifies the request in frames
    request: Request
    finished: bool
    num_sent: int = 0  # number of blocks of its table sent so far


@dataclass(slots=True, eq=False)
class _Run:
    """A request that decodes one token in every step."""

    handle: int
    first: int  # index of the first step in the frame
    start: int  # position of the token in that step


class StepRecorder:
    """Records one engine from the first keyframe on. `frame` and `keyframe` clear the returned data."""

    def __init__(self, observer: SchedulerObserver) -> None:
        self._observer = observer
        self._limits: StepLimits | None = None  # limits of the last step
        self._known: dict[str, _Known] = {}
        self._num_handles = 0
        self._cancelled: dict[str, int] = {}  # handles of requests cancelled before their first step
        self._tenants = TenantNumbers()
        self._decoding: list[Request] = []  # requests that decoded in the last step
        self._decoding_set: set[Request] = set()  # the same
        self._runs: dict[str, _Run] = {}  # open runs by request id
        self._policy = ""
        self._chunks: Sequence[Chunk] = ()  # chunks of the current step
        self._clear()

    def _clear(self) -> None:
        self._lists: defaultdict[str, list[Any]] = defaultdict(list)
        self._num_steps = 0

    def stop(self) -> None:
        self._observer.stop()

    # ---- recording -----------------------------------------------------------------------------------------------

    def record(self, events: Sequence[Event]) -> None:
        """Record the events of one call of `Engine.step`."""
        done = events[-1] if events and isinstance(events[-1], StepDone) else None
        plan = done.plan if done is not None else None
        self._chunks = plan.chunks if plan is not None else ()
        accepted: dict[str, int] = {}
        for event in [each for each in events if type(each) not in _FREQUENT]:
            match event:
                case BudgetDecided():
                    self._limits = event.limits
                case DraftsVerified():
                    accepted[event.request_id] = event.accepted
                case RequestQueued(time, request_id, num_prompt):
                    self._queue(request_id, time, num_prompt)
                case RequestAdmitted(time, request_id, cached, miss, swapped):
                    reason = miss.name.lower() if miss else None
                    self._add("board", request_id, _seconds(time), cached, reason, swapped)
                case RequestPreempted(time, request_id, computed, swapped):
                    known = self._add("preempt", request_id, _seconds(time), computed, int(swapped))
                    if known is not None:
                        known.num_sent = UNKNOWN
                case RequestFinished(time, request_id, ending):
                    self._finish(request_id, _seconds(time), ending.reason.value)
        if done is not None and plan is not None:
            self._record_step(done, plan, accepted)

    def _queue(self, request_id: str, time: float, num_prompt: int) -> None:
        if self._get_known(request_id) is None:  # cancelled before the next step
            self._cancelled[request_id] = self._num_handles
            self._lists["new"].append(
                [self._num_handles, request_id, _seconds(time), num_prompt, 0, self._tenants.number_of(""), 0, ""]
            )
            self._num_handles += 1

    def _add(self, kind: str, request_id: str, *values: Any) -> _Known | None:
        known = self._get_known(request_id)
        if known is not None:
            self._lists[kind].append([known.handle, self._num_steps, *values])
        return known

    def _get_known(self, request_id: str) -> _Known | None:
        """Return the request, announced to the page if it is new; None if the scheduler no longer has it."""
        known = self._known.get(request_id)
        if known is None:
            # A request that was queued and finished within one step is only in its chunks.
            in_step = (chunk.request for chunk in self._chunks if chunk.request.id == request_id)
            request = self._observer.find(request_id) or next(in_step, None)
            if request is None:
                return None
            known = self._known[request_id] = _Known(self._num_handles, request, request.status is Status.FINISHED)
            self._num_handles += 1
            self._lists["new"].append([*self._description(known), request.service_class])
        return known

    def _description(self, known: _Known) -> list[Any]:
        request, tenant = known.request, self._tenants.number_of(known.request.tenant)
        arrival = _seconds(request.arrival)
        return [known.handle, request.id, arrival, request.num_prompt, request.max_new_tokens, tenant, request.priority]

    def _finish(self, request_id: str, time: float, reason: str) -> None:
        if request_id in self._cancelled:
            self._lists["end"].append([self._cancelled.pop(request_id), self._num_steps, time, reason, 0, 0])
        known = self._known.get(request_id)
        if known is not None:
            known.finished = True
            keeps_slot = int(self._observer.keeps_slots)  # A running request keeps it until its batch ends.
            num_output = known.request.num_output
            self._lists["end"].append([known.handle, self._num_steps, time, reason, num_output, keeps_slot])

    def _record_step(self, done: StepDone, plan: StepPlan, accepted: Mapping[str, int]) -> None:
        limits, timing, index = self._limits, done.timing, self._num_steps
        self._lists["steps"].append(
            [
                done.step,
                _seconds(done.time),
                _seconds(done.seconds),
                _seconds(done.predicted_seconds or 0.0),
                done.decode_tokens,
                done.prefill_tokens,
                done.padding_tokens,
                plan.idle_rows,
                done.waiting,
                done.used_blocks,
                limits.tokens if limits else 0,
                limits.prefill_tokens if limits else 0,
                [
                    _seconds(part)
                    for part in (done.schedule_seconds, timing.build, timing.forward, timing.sample, done.apply_seconds)
                ],
            ]
        )
        if done.prefill_tokens or done.decode_tokens > len(plan.chunks):
            # Inlined test for a plain decode: a call per chunk takes longer.
            decoding = [one.request for one in plan.chunks if one.count == 1 and one.start >= one.request.num_prompt]
            others = [one for one in plan.chunks if one.count > 1 or one.start < one.request.num_prompt]
            self._record_chunks(others, index, accepted)
        else:
            decoding = [chunk.request for chunk in plan.chunks]
        if decoding != self._decoding:
            self._change_runs(plan.chunks, decoding, index)
        self._num_steps += 1

    def _record_chunks(self, chunks: Sequence[Chunk], index: int, accepted: Mapping[str, int]) -> None:
        for chunk in chunks:
            known = self._get_known(chunk.request.id)
            if known is not None:
                drafts = (len(chunk.drafts), accepted.get(chunk.request.id, 0)) if chunk.drafts else ()
                self._lists["chunks"].append([known.handle, index, chunk.start, chunk.count, *drafts])

    def _change_runs(self, chunks: Sequence[Chunk], decoding: list[Request], index: int) -> None:
        """End the runs of requests that no longer decode and start runs for those that began to."""
        now, before = set(decoding), self._decoding_set
        for request in before - now:
            run = self._runs.pop(request.id, None)
            if run is not None and index > run.first:
                self._lists["runs"].append([run.handle, run.first, index - run.first, run.start])
        if joined := now - before:
            for chunk in chunks:
                known = self._get_known(chunk.request.id) if chunk.request in joined else None
                if known is not None:
                    self._runs[chunk.request.id] = _Run(known.handle, index, chunk.start)
        self._decoding, self._decoding_set = decoding, now

    def _cut_runs(self) -> None:
        """Write all open runs to the frame; they continue in the next one."""
        runs, steps = self._lists["runs"], self._num_steps
        for run in self._runs.values():
            count = steps - run.first
            if count:
                runs.append([run.handle, run.first, count, run.start])
                run.start += count
            run.first = 0

    # ---- frames --------------------------------------------------------------------------------------------------

    def frame(self, now: float) -> FrameData:
        """Return the events since the last frame and the state of the queue."""
        self._cut_runs()
        snapshot = self._observer.snapshot(known.request for known in self._known.values())
        self._record_tables(snapshot)
        frame = {"t": "batch", "now": _seconds(now), **self._queue_state(snapshot), **self._lists}
        if snapshot.blocks:
            frame["blocks"] = _flat(snapshot.blocks)
        self._clear()
        return frame

    def keyframe(self, now: float, wall: float) -> FrameData:
        """Return the complete state, for a new page. `frame` must be called for earlier events first."""
        setup = self._observer.start()
        self._limits = setup.limits
        for request in setup.requests:
            self._get_known(request.id)
        self._lists.pop("new", None)  # the keyframe contains all requests
        self._policy = ""  # include the policy again
        snapshot = self._observer.snapshot(known.request for known in self._known.values())
        return {
            "t": "key",
            "format": FORMAT,
            "now": _seconds(now),
            "wall": round(wall, 3),
            "slots": setup.max_batch_requests,
            "num_blocks": setup.num_blocks,
            "block_size": setup.block_size,
            "prefix_caching": setup.prefix_caching,
            "order": setup.ordering,
            **self._queue_state(snapshot),
            "requests": [self._full_description(known, snapshot) for known in self._known.values()],
            "blocks": _flat(setup.blocks),
        }

    def take_tenant_names(self, *, all_of_them: bool = False) -> dict[int, str]:
        """Return the names of tenant numbers that were not sent yet, or of all numbers."""
        return self._tenants.take_all() if all_of_them else self._tenants.take_unsent()

    def _full_description(self, known: _Known, snapshot: SchedulerSnapshot) -> list[Any]:
        request, table = known.request, list(snapshot.tables[known.request.id])
        known.num_sent = len(table)
        state = {Status.WAITING: "waiting", Status.RUNNING: "running"}.get(request.status, "idle")
        described = [*self._description(known), state, request.num_computed, request.num_output, table]
        return [*described, request.service_class]

    def _queue_state(self, snapshot: SchedulerSnapshot) -> FrameData:
        state: FrameData = {
            "waiting": [
                [self._known[request_id].handle, reason.label]
                for request_id, reason in snapshot.waiting
                if request_id in self._known
            ],
            "reasons": {reason.label: count for reason, count in snapshot.wait_reasons.items()},
            "evictions": snapshot.evictions,
        }
        if snapshot.states is not None:
            state["states"] = list(snapshot.states)
        if snapshot.policy != self._policy:
            self._policy = state["policy"] = snapshot.policy
        return state

    def _record_tables(self, snapshot: SchedulerSnapshot) -> None:
        for known in list(self._known.values()):
            table = snapshot.tables[known.request.id]
            if known.request.id in snapshot.rewritten:
                known.num_sent = UNKNOWN
            if len(table) != known.num_sent:
                start = known.num_sent if 0 <= known.num_sent < len(table) else 0
                self._lists["tables"].append([known.handle, start, list(table[start:])])
                known.num_sent = len(table)
            if known.finished and not table:
                del self._known[known.request.id]


def _flat(blocks: Sequence[BlockState]) -> list[int]:
    """Flatten block states to [block, references, cached, block, references, cached, …]."""
    return [number for state in blocks for number in (state.block, state.references, int(state.cached))]


def _seconds(value: float) -> float:
    return round(value, 6)


MAX_TENANTS = 1000


class TenantNumbers:
    """Assigns numbers to tenants and keeps the most recent ones, since clients may send any name.

    A tenant that was dropped and returns gets a new number. Numbers are never reused: pages aggregate by name, so old
    numbers stay valid. A name is sent once, and then only with keyframes, so pages must keep at least as many names.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._numbers: dict[str, int] = {}  # ordered by last use
        self._next = 0
        self._unsent: dict[int, str] = {}

    def number_of(self, name: str) -> int:
        number = self._numbers.pop(name, None)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._unsent[number] = name
            if len(self._numbers) >= self._max_tenants:
                del self._numbers[next(iter(self._numbers))]
        self._numbers[name] = number
        return number

    def take_unsent(self) -> dict[int, str]:
        """Return the names of the numbers assigned since the last call."""
        names, self._unsent = self._unsent, {}
        return names

    def take_all(self) -> dict[int, str]:
        """Return the names of all kept numbers, and of those assigned since the last call."""
        return {number: name for name, number in self._numbers.items()} | self.take_unsent()


log = logging.getLogger("chairlift")

FRAME_SECONDS = 0.1  # Frames are this far apart, so that they look live.
IDLE_FRAME_SECONDS = 1.0  # Frames are this far apart while no steps run.
MAX_FRAME_SHARE = 0.003  # Share of the engine's time; large frames are sent less often, down to one per second
MIN_KEYFRAME_SECONDS = 0.5  # Keyframes are this far apart.
MAX_KEYFRAME_SHARE = 0.01  # Share of the engine's time; large keyframes are sent less often
MAX_FAULTS = 3  # The recorder is switched off after more within FAULT_SECONDS.
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
        elif self._recorder is not None and time.monotonic() - self._last_frame >= (
            self._interval if self._has_news else IDLE_FRAME_SECONDS
        ):
            begun = time.thread_time()
            self._publish(self._recorder, self._recorder.frame(self._engine.now()))
            cost = time.thread_time() - begun
            self._interval = min(IDLE_FRAME_SECONDS, max(FRAME_SECONDS, cost / MAX_FRAME_SHARE))

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

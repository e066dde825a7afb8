"""The engine process: receives requests from a socket, runs steps, and reports them.

The front end starts it as `python -m chairlift.server.process.engine_process` with its settings as JSON in the first
argument. It exits on a Shutdown message, or when its parent process is gone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from chairlift.core.events import (
    BudgetDecided,
    DraftsVerified,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StepDone,
    TextProduced,
    TokenProduced,
)
from chairlift.core.policies.base import make_policy
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.dashboard.frame_publisher import FramePublisher
from chairlift.server.gc_tuning import freeze_loaded_objects
from chairlift.server.process.messages import (
    Cancel,
    FailedToLoad,
    FromEngine,
    Heartbeat,
    Loaded,
    RecordSteps,
    Refused,
    Shutdown,
    StepReport,
    Submit,
    SwitchPolicy,
    Update,
    decode_to_engine,
    encode,
)

OUTPUT_EVENTS = (TokenProduced, TextProduced)  # by far the most frequent
CLIENT_EVENTS = (*OUTPUT_EVENTS, RequestAdmitted, RequestFinished)  # those that become updates
IDLE_POLL_MS = 200
HEARTBEAT_SECONDS = 0.5


class EngineProcess:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.parent: int = settings["parent"]  # not os.getppid(): the parent may be gone already
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        for socket in (self.inbox, self.outbox):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.inbox.connect(settings["commands"])
        self.outbox.connect(settings["reports"])
        self.stopping = False
        self.turn_began: float | None = None  # an iteration of the main loop; None while loading

    def main(self) -> int:
        """Load the engine and serve until stopped. The exit status is 1 only after a failed step."""
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        try:
            self._load()
        except ChairliftError as error:
            self._send(FailedToLoad(str(error)))
            return 0
        freeze_loaded_objects()
        try:
            return self._serve()
        finally:
            self.engine.shut_down()

    def _serve(self) -> int:
        while not self.stopping and os.getppid() == self.parent:
            self._turn()
            if self.engine.fatal is not None:
                logging.getLogger("chairlift").error("a step failed", exc_info=self.engine.fatal)
                return 1
        return 0

    def _turn(self) -> None:
        """Receive messages, then run a step, so that requests cancelled before the step are not in it."""
        self.turn_began = time.monotonic()
        prepared = self.engine.prepare()
        self._receive_messages(0 if prepared else min(1000 * self.engine.pause(), IDLE_POLL_MS))
        if self.engine.has_work:
            events = self.engine.step()
            self._report(events)
            self.frames.record(events)
        self.frames.publish_if_due()

    def _load(self) -> None:
        from chairlift.config import EngineConfig
        from chairlift.engine.startup import load_engine

        started = load_engine(self.settings["model"], EngineConfig(**self.settings["engine"]), progress=False)
        self.engine = started.engine
        self.frames = FramePublisher(self.engine, self._send)
        max_batch_requests = self.engine.scheduler.max_batch_requests
        self._send(Loaded(self.engine.limits, max_batch_requests))

    def _send_heartbeats(self) -> None:
        """Runs in a thread, with its own socket: sockets are not thread-safe."""
        socket = zmq.Context().socket(zmq.PUSH)  # a separate context, so that the exit does not wait for it
        socket.connect(self.settings["reports"])
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            began = self.turn_began
            socket.send(encode(Heartbeat(0.0 if began is None else time.monotonic() - began)))

    def _receive_messages(self, wait_ms: float) -> None:
        if wait_ms > 0 and not self.inbox.poll(math.ceil(wait_ms)):
            return
        while True:
            try:
                data = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        match decode_to_engine(data):
            case Submit() as request:
                self._submit(request)
            case Cancel(request_ids):
                for request_id in request_ids:
                    self.engine.cancel(request_id)
            case RecordSteps() as lease:
                self.frames.extend_lease(lease)
            case SwitchPolicy(name, max_delay_ms):
                self.engine.switch_policy(make_policy(name, max_delay_ms))  # the front end has checked it
            case Shutdown():
                self.stopping = True

    def _submit(self, request: Submit) -> None:
        try:
            self.engine.submit(
                request.prompt,
                request.params,
                request_id=request.request_id,
                timeout=request.timeout,
                cache_salt=request.cache_salt,
                priority=request.priority,
                tenant=request.tenant,
            )
        except InvalidParameter as error:
            self._send(Refused(request.request_id, error.parameter, error.problem))

    def _report(self, events: Sequence[Event]) -> None:
        rest = [event for event in events if not isinstance(event, OUTPUT_EVENTS)]
        for event in rest:
            if not isinstance(event, RequestFinished):
                continue
            ending = event.ending
            if ending.parameter is not None or ending.temporary:
                self._send(Refused(event.request_id, ending.parameter, str(ending.detail)))
        scheduler = self.engine.scheduler
        pool = scheduler.kv.pool
        report = StepReport(
            updates=collect_updates(events),
            waiting=len(scheduler.waiting),
            wait_reasons={reason.name.lower(): count for reason, count in scheduler.waiting.reasons().items()},
            lookups=_lookups(rest),
            used_blocks=pool.num_used,
            total_blocks=pool.num_blocks,
            preemptions=sum(isinstance(event, RequestPreempted) for event in rest),
        )
        for done in rest:
            if isinstance(done, StepDone):
                report = msgspec.structs.replace(
                    report,
                    decode_tokens=done.decode_tokens,
                    prefill_tokens=done.prefill_tokens,
                    requests=done.requests,
                    seconds=done.seconds,
                    part_seconds=_parts(done),
                    predicted_seconds=done.predicted_seconds,
                    speedup=done.speedup,
                    **_drafts(rest),
                )
            elif isinstance(done, BudgetDecided):
                limit, reason = done.limits.prefill_tokens, done.limits.reason.name.lower()
                report = msgspec.structs.replace(report, prefill_limit=limit, limit_reason=reason)
        self._send(report)

    def _send(self, message: FromEngine) -> None:
        self.outbox.send(encode(message))


def _drafts(events: Sequence[Event]) -> dict[str, Any]:
    verified = [event for event in events if isinstance(event, DraftsVerified)]
    if not verified:
        return {}
    positions = range(max(event.proposed for event in verified))
    return {
        "verifications": len(verified),
        "proposed_at": [sum(event.proposed > position for event in verified) for position in positions],
        "accepted_at": [sum(event.accepted > position for event in verified) for position in positions],
    }


def _parts(done: StepDone) -> dict[str, float]:
    timing = done.timing
    return {
        "schedule": done.schedule_seconds,
        "build": timing.build,
        "forward": timing.forward,
        "sample": timing.sample,
        "apply": done.apply_seconds,
    }


def _lookups(events: Sequence[Event]) -> dict[str, int]:
    """Prefix cache lookups by result: "all_found", or why no longer prefix was found."""
    admitted = [event for event in events if isinstance(event, RequestAdmitted)]
    return dict(Counter(event.miss.name.lower() if event.miss else "all_found" for event in admitted))


def collect_updates(events: Sequence[Event]) -> list[Update]:
    """The events of one step, grouped by completion. The engine waits for this, so it must be fast."""
    updates: dict[str, Update] = {}
    for event in events:
        if not isinstance(event, CLIENT_EVENTS):
            continue
        update = updates.get(event.request_id)
        if update is None:
            update = updates[event.request_id] = Update(event.request_id)
        if isinstance(event, TokenProduced):
            update.tokens.append(event.token)
            if event.logprobs is not None:
                update.logprobs.append(event.logprobs)
        elif isinstance(event, TextProduced):
            update.text += event.text
        elif isinstance(event, RequestFinished):
            update.finish_reason, update.stop_reason = event.ending.reason.value, event.ending.detail
            update.score = event.score
        elif update.cached_tokens is None:
            update.cached_tokens = event.cached_tokens
    return list(updates.values())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the front end handles it
    settings = json.loads(sys.argv[1])
    level = logging.WARNING if settings["quiet"] else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(level)
    process = EngineProcess(settings)
    try:
        sys.exit(process.main())
    finally:
        process.context.destroy(linger=1000)  # send what is queued


if __name__ == "__main__":
    main()

"""The engine's side of the dashboard: faults, leases and the rate of keyframes."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.core.events import Event
from chairlift.server.dashboard import recorder
from chairlift.server.dashboard.recorder import MAX_FAULTS, MAX_KEYFRAME_SHARE, FramePublisher, StepRecorder
from chairlift.server.wire.messages import DashboardFrame, RecorderFault, RecordSteps
from tests.core.driving import make_request, make_scheduler, run_plan


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0
        self.worked = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def thread_time(self) -> float:
        return self.worked


class RecordedEngine:
    """A running scheduler with a frame publisher."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.scheduler = make_scheduler(num_blocks=400)
        self.sent: list[DashboardFrame | RecorderFault] = []
        engine: Any = SimpleNamespace(scheduler=self.scheduler, now=clock.monotonic)
        self.publisher = FramePublisher(engine, self.sent.append)

    def turn(self) -> None:
        """One iteration of the engine's loop."""
        plan = self.scheduler.schedule(self.clock.now)
        events: list[Event] = []
        if plan:
            self.scheduler.apply(run_plan(plan), self.clock.now)
        events += self.scheduler.drain_events()
        self.publisher.record(events)
        self.publisher.publish_if_due()
        self.clock.now += 0.2

    def kinds(self) -> list[str]:
        sent, self.sent[:] = list(self.sent), []
        return [json.loads(one.json)["t"] if isinstance(one, DashboardFrame) else f"fault {one.is_off}" for one in sent]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedEngine:
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    return RecordedEngine(clock)


def breaking(_: StepRecorder, events: Any) -> None:
    raise KeyError("lost count")


def test_a_fault_is_reported_and_the_recorder_restarts(
    recorded: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.publisher.extend_lease(RecordSteps(100.0, keyframe=True))
    recorded.scheduler.submit(make_request("a", 4, 30), 0.0)
    recorded.turn()
    assert recorded.kinds() == ["key"]
    with monkeypatch.context() as patch:
        patch.setattr(StepRecorder, "record", breaking)
        recorded.turn()
    for _ in range(3):
        recorded.turn()
    assert recorded.kinds() == ["fault False", "key", "batch"]


@pytest.mark.parametrize("where", ["record", "frame", "keyframe", "take_tenant_names", "stop"])
def test_faults_are_contained_and_switch_the_recorder_off(
    recorded: RecordedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setattr(StepRecorder, where, breaking if where == "record" else fail)
    if where == "stop":
        monkeypatch.setattr(StepRecorder, "record", breaking)
    request = make_request("a", 4, 30)
    recorded.scheduler.submit(request, 0.0)
    recorded.publisher.extend_lease(RecordSteps(100.0, keyframe=True))
    with caplog.at_level(logging.CRITICAL, "chairlift"):
        for _ in range(20):
            recorded.turn()
    kinds = recorded.kinds()
    assert [kind for kind in kinds if kind.startswith("fault")] == ["fault False"] * (MAX_FAULTS - 1) + ["fault True"]
    assert kinds[-1] == "fault True"  # nothing follows
    assert request.num_output == 20  # a token in every step, despite the faults


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("cannot")


def test_rare_faults_do_not_switch_it_off(recorded: RecordedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(MAX_FAULTS + 2):
        recorded.publisher.extend_lease(RecordSteps(10.0, keyframe=True))
        with monkeypatch.context() as patch:
            patch.setattr(StepRecorder, "keyframe", fail)
            recorded.turn()
        recorded.turn()
        assert recorded.kinds() == ["fault False", "key"]
        recorded.clock.now += 60.0
        recorded.turn()  # the lease has ended


def test_recording_stops_when_the_lease_ends(recorded: RecordedEngine) -> None:
    recorded.publisher.extend_lease(RecordSteps(1.0, keyframe=True))
    recorded.turn()
    recorded.clock.now += 2.0
    recorded.turn()
    recorded.turn()
    assert recorded.kinds() == ["key"]
    assert not recorded.scheduler.kv.take_changes().blocks


@pytest.mark.parametrize(("work", "most"), [(0.0, 200), (0.02, 25), (0.2, 3)])
def test_keyframes_take_a_small_share_of_the_engines_time(
    recorded: RecordedEngine, monkeypatch: pytest.MonkeyPatch, work: float, most: int
) -> None:
    def working(method: Any) -> Any:
        def wrapped(*given: Any) -> Any:
            recorded.clock.worked += work
            return method(*given)

        return wrapped

    for name in ("frame", "keyframe"):
        monkeypatch.setattr(StepRecorder, name, working(getattr(StepRecorder, name)))
    seconds = 100.0
    end = recorded.clock.now + seconds
    while recorded.clock.now < end:
        recorded.publisher.extend_lease(RecordSteps(10.0, keyframe=True))  # as if pages reconnected all the time
        recorded.turn()
    keys = recorded.kinds().count("key")
    assert most / 2 <= keys <= most
    # Each keyframe but the first follows a frame, and the cost of the last one is paid after it.
    assert (2 * (keys - 1) - 1) * work <= MAX_KEYFRAME_SHARE * seconds

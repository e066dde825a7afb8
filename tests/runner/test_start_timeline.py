"""The phases of an engine's start."""

from __future__ import annotations

import time

import pytest

from chairlift.progress import StartTimeline


def test_phases_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([12.0, 12.5, 13.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    timeline = StartTimeline(begun=10.0)
    for phase in ("imports", "cache", "imports"):
        timeline.end(phase)
    assert list(timeline.seconds.items()) == [("imports", 3.0), ("cache", 0.5)]
    assert str(timeline) == "3.50 s: imports 3.00, cache 0.50"

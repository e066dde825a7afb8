"""Dashboard frames, sent by a scripted engine and read by a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from chairlift.server.wire.messages import DashboardFrame, RecordSteps, ToEngine
from tests.server.front_end import FrontEnd, ScriptedEngine, answer_ok


def headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def frame(number: int, *, is_key: bool = False, tenants: dict[int, str] | None = None) -> DashboardFrame:
    return DashboardFrame(json.dumps({"t": "key" if is_key else "batch", "n": number}).encode(), is_key, tenants or {})


def send_frames(engine: ScriptedEngine, message: ToEngine) -> None:
    """Answers requests, and sends a keyframe when one is requested."""
    answer_ok(engine, message)
    if isinstance(message, RecordSteps) and message.keyframe:
        deliver(engine, frame(0, is_key=True, tenants={0: "alice", 1: "bob"}))


def deliver(engine: ScriptedEngine, *frames: DashboardFrame) -> None:
    for one in frames:
        engine.loop.call_soon_threadsafe(engine.on_frame, one)


@contextmanager
def open_page(front: FrontEnd, key: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """Open a page's stream and yield its frames."""
    with (
        httpx.Client(timeout=20) as client,
        client.stream("GET", f"{front.url}/dashboard/stream", headers=headers(key)) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def next_frame(frames: Iterator[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(one for one in frames if one["t"] == kind)

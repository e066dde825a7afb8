"""What the numbers say."""

from __future__ import annotations

from chairlift.serving.messages import StepReport
from chairlift.serving.metrics import Metrics


def test_a_restart_is_counted_and_the_old_engine_holds_nothing() -> None:
    metrics = Metrics()
    metrics.take_in(StepReport(updates=[], waiting=4, used_blocks=7, total_blocks=9, preemptions=0, requests=3))
    assert b"chairlift_kv_blocks_used 7.0" in metrics.render()
    metrics.note_restart()
    shown = metrics.render().decode().splitlines()
    for line in ("kv_blocks_used 0.0", "requests_running 0.0", "requests_waiting 0.0", "engine_restarts_total 1.0"):
        assert f"chairlift_{line}" in shown

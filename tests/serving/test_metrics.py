"""What the numbers say."""

from __future__ import annotations

import msgspec

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


def test_the_error_of_predictions_and_the_budget_are_shown() -> None:
    metrics = Metrics()
    empty = StepReport(updates=[], waiting=0, used_blocks=1, total_blocks=9, preemptions=0)
    metrics.take_in(msgspec.structs.replace(empty, requests=3, seconds=0.2))  # nothing was predicted yet
    metrics.take_in(msgspec.structs.replace(empty, requests=3, seconds=0.2, predicted_seconds=0.15))
    metrics.take_in(msgspec.structs.replace(empty, prefill_limit=48, limit_reason="tpot"))
    shown = metrics.render().decode().splitlines()
    assert "chairlift_step_prediction_error_ratio_count 1.0" in shown
    assert 'chairlift_step_prediction_error_ratio_bucket{le="0.2"} 0.0' in shown
    assert 'chairlift_step_prediction_error_ratio_bucket{le="0.3"} 1.0' in shown
    assert "chairlift_step_prefill_limit_tokens 48.0" in shown
    assert 'chairlift_budget_decisions_total{reason="tpot"} 1.0' in shown

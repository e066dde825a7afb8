"""Figures from token times, checked by hand."""

from __future__ import annotations

import pytest

from chairlift_lab.common.engines import EngineFigures, Measurement, add_speedups, percentile


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([7.0], 99) == 7.0


def test_a_row_is_computed_from_token_times() -> None:
    inside = EngineFigures(
        steps=3,
        mean_batch_requests=5 / 3,
        scheduler_share=0.04,
        preemptions=0,
        peak_kv_blocks=9,
        peak_batch_requests=2,
        useful_token_share=0.75,
        cached_tokens=4,
    )
    row = Measurement(2.0, input_tokens=10, token_times=[[0.5, 1.0, 2.0], [1.0, 2.0]], inside=inside).row("chairlift")
    assert row["name"] == "chairlift"
    assert (row["output_tokens"], row["input_tokens"], row["requests"]) == (5, 10, 2)
    assert (row["output_tokens_per_s"], row["total_tokens_per_s"]) == (2.5, 7.5)
    assert row["ttft_p50_ms"] == pytest.approx(750)
    assert row["itl_mean_ms"] == pytest.approx((500 + 1000 + 1000) / 3)
    assert (row["steps"], row["scheduler_share"], row["preemptions"], row["peak_kv_blocks"]) == (3, 0.04, 0, 9)
    assert (row["peak_batch_requests"], row["useful_token_share"], row["cached_tokens"]) == (2, 0.75, 4)


def test_latencies_count_from_the_arrival() -> None:
    row = Measurement(9.0, input_tokens=2, token_times=[[1.0, 2.0], [5.0, 9.0]], arrivals=[0.0, 4.0]).row("a")
    assert row["ttft_p50_ms"] == pytest.approx(1000)
    assert row["latency_p50_ms"] == pytest.approx((2000 + 5000) / 2)
    assert row["latency_p99_ms"] == pytest.approx(2000 + 0.99 * 3000)


def test_figures_that_an_engine_does_not_report_are_null() -> None:
    row = Measurement(1.0, input_tokens=1, token_times=[[0.5]]).row("transformers")
    unknown = {"itl_mean_ms", "itl_p99_ms", "steps", "mean_batch_requests", "scheduler_share", "preemptions"}
    unknown |= {"peak_kv_blocks", "peak_batch_requests", "useful_token_share", "cached_tokens"}
    assert {name for name, value in row.items() if value is None} == unknown


def test_speedups_compare_each_row_to_the_others() -> None:
    rows = [{"name": "a", "output_tokens_per_s": 6.0}, {"name": "b", "output_tokens_per_s": 2.0}]
    add_speedups(rows)
    assert [row["speedup_vs"] for row in rows] == [{"b": 3.0}, {"a": pytest.approx(1 / 3)}]

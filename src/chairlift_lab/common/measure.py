"""Figures of a report, from the times of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

TokenProgress = Callable[[int], None]
"""Called with the number of tokens generated so far; with 0 when the clock starts."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures from inside an engine, which peers do not have."""

    steps: int
    mean_batch_requests: float
    scheduler_share: float  # share of step time outside the model and the sampler
    preemptions: int
    peak_kv_blocks: int
    peak_batch_requests: int
    useful_token_share: float  # share of the computed tokens that are not padding
    cached_tokens: int  # prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a workload. Times are seconds since its start."""

    seconds: float
    input_tokens: int
    token_times: Sequence[Sequence[float]]  # When each token of each request arrived.
    inside: EngineFigures | None = None
    arrivals: Sequence[float] | None = None  # When each request arrived; None: all at the start.

    def row(self, name: str) -> dict[str, Any]:
        """The figures, with the keys of docs/bench-json.md."""
        output_tokens = sum(len(times) for times in self.token_times)
        arrivals = self.arrivals or [0.0] * len(self.token_times)
        first = [times[0] - arrival for times, arrival in zip(self.token_times, arrivals, strict=True)]
        whole = [times[-1] - arrival for times, arrival in zip(self.token_times, arrivals, strict=True)]
        gaps = [later - earlier for times in self.token_times for earlier, later in pairwise(times)]
        inside = self.inside
        return {
            "name": name,
            "output_tokens_per_s": output_tokens / self.seconds,
            "total_tokens_per_s": (self.input_tokens + output_tokens) / self.seconds,
            "seconds": self.seconds,
            "output_tokens": output_tokens,
            "input_tokens": self.input_tokens,
            "requests": len(self.token_times),
            "ttft_p50_ms": percentile(first, 50) * 1e3,
            "ttft_p95_ms": percentile(first, 95) * 1e3,
            "latency_p50_ms": percentile(whole, 50) * 1e3,
            "latency_p99_ms": percentile(whole, 99) * 1e3,
            "itl_mean_ms": sum(gaps) / len(gaps) * 1e3 if gaps else None,
            "itl_p99_ms": percentile(gaps, 99) * 1e3 if gaps else None,
            "steps": inside and inside.steps,
            "mean_batch_requests": inside and inside.mean_batch_requests,
            "scheduler_share": inside and inside.scheduler_share,
            "preemptions": inside and inside.preemptions,
            "peak_kv_blocks": inside and inside.peak_kv_blocks,
            "peak_batch_requests": inside and inside.peak_batch_requests,
            "useful_token_share": inside and inside.useful_token_share,
            "cached_tokens": inside and inside.cached_tokens,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, interpolated linearly."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def add_speedups(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row the ratios of its output tokens/s to those of the others."""
    for row in rows:
        row["speedup_vs"] = {
            other["name"]: row["output_tokens_per_s"] / other["output_tokens_per_s"]
            for other in rows
            if other is not row
        }

"""Figures of a report, from the records of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift_lab.common.measure import percentile
from chairlift_lab.load.run import LoadRecord, LoadRun


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one completed request, in seconds."""

    ttft: float
    tpot: float | None  # None for an answer of one token
    e2e: float

    @classmethod
    def of(cls, record: LoadRecord) -> Latency:
        first = record.times[0] if record.times else record.end
        ttft, e2e = first - record.sent, record.end - record.sent
        tpot = (e2e - ttft) / (record.output_tokens - 1) if record.output_tokens > 1 else None
        return cls(ttft, tpot, e2e)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """The limits of a good answer, in milliseconds; without limits every answer is good."""

    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None
    max_e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_ttft_ms", "max_tpot_ms", "max_e2e_ms"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise InvalidParameter(name, f"must be above 0, got {limit}")

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.max_ttft_ms, self.max_tpot_ms, self.max_e2e_ms))

    def met_by(self, latency: Latency) -> bool:
        pairs = (
            (latency.ttft, self.max_ttft_ms),
            (latency.tpot, self.max_tpot_ms),
            (latency.e2e, self.max_e2e_ms),
        )
        return all(limit is None or value is None or value * 1e3 <= limit for value, limit in pairs)


def answered(run: LoadRun) -> list[LoadRecord]:
    return [record for record in run.records if record.error is None]


def token_gaps(records: Sequence[LoadRecord]) -> list[float]:
    """Seconds between consecutive pieces of the same answer."""
    return [later - earlier for record in records for earlier, later in pairwise(record.times)]


def in_flight(records: Sequence[LoadRecord]) -> list[tuple[float, int]]:
    """The number of requests in flight, from each moment at which it changed."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    steps, count = [], 0
    for moment, change in changes:  # ends come before starts at the same moment
        count += change
        steps.append((moment, count))
    return steps


def load_row(name: str, runs: Sequence[LoadRun], limits: LatencyLimits) -> dict[str, Any]:
    """The figures of one or several runs together, with the keys of docs/bench-json.md."""
    records = [record for run in runs for record in run.records]
    good_ones = [record for run in runs for record in answered(run)]
    latencies = [Latency.of(record) for record in good_ones]
    seconds = max(sum(run.seconds for run in runs), 1e-9)
    input_tokens, output_tokens = _total(good_ones, "input_tokens"), _total(good_ones, "output_tokens")
    good = sum(limits.met_by(latency) for latency in latencies)
    return {
        "name": name,
        "runs": len(runs),
        "requests": len(records),
        "completed": len(good_ones),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "seconds": seconds,
        "requests_per_s": len(good_ones) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (input_tokens + output_tokens) / seconds,
        "input_tokens": input_tokens,
        "cached_tokens": _total(good_ones, "cached_tokens"),
        "output_tokens": output_tokens,
        "goodput_per_s": good / seconds,
        "goodput_share": good / len(records) if records else None,
        "peak_concurrency": max((count for run in runs for _, count in in_flight(run.records)), default=0),
        "send_lag_p99_ms": _percentile_ms([record.sent - record.due for record in records], 99),
        **_spread("ttft", [latency.ttft for latency in latencies]),
        **_spread("tpot", [latency.tpot for latency in latencies if latency.tpot is not None]),
        **_spread("itl", token_gaps(good_ones)),
        **_spread("e2e", [latency.e2e for latency in latencies]),
        "cpu_seconds": dict(sum((Counter(run.cpu_seconds) for run in runs), Counter[str]())),
    }


def _total(records: Sequence[LoadRecord], name: str) -> int:
    return sum(getattr(record, name) for record in records)


def _spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    spread = {f"{name}_mean_ms": sum(seconds) / len(seconds) * 1e3 if seconds else None}
    return spread | {f"{name}_p{percent}_ms": _percentile_ms(seconds, percent) for percent in (50, 95, 99)}


def _percentile_ms(seconds: list[float], percent: float) -> float | None:
    return percentile(seconds, percent) * 1e3 if seconds else None

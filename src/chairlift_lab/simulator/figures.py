"""Computes the figures of a report from the outcome of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift_lab.simulator.records import Gaps, RequestRecord, SimulationOutcome

SHARES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; a request that meets all of them counts as good."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2e))

    def met_by(self, record: RequestRecord) -> bool:
        pairs = ((record.ttft, self.ttft), (record.tpot, self.tpot), (record.e2e, self.e2e))
        return all(limit is None or value is None or value <= limit for value, limit in pairs)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of the values do not exceed."""
    return weighted_percentiles(((value, 1) for value in values), [share])[0]


def weighted_percentiles(values: Iterable[tuple[float, int]], shares: Sequence[float]) -> list[float]:
    """Percentiles of (value, count) pairs for several shares, in rising order."""
    ordered = sorted(values)
    total = sum(count for _, count in ordered)
    percentiles: list[float] = []
    seen = 0
    for value, count in ordered:
        seen += count
        while len(percentiles) < len(shares) and seen >= shares[len(percentiles)] / 100 * total:
            percentiles.append(value)
    return percentiles + [ordered[-1][0]] * (len(shares) - len(percentiles))


def figures(outcome: SimulationOutcome, targets: Targets) -> dict[str, Any]:
    records = outcome.records
    tokens = sum(record.n_out for record in records)
    good = sum(targets.met_by(record) for record in records)
    row: dict[str, Any] = {
        "requests": len(records),
        "seconds": outcome.seconds,
        "requests_per_s": len(records) / outcome.seconds,
        "output_tokens_per_s": tokens / outcome.seconds,
        "goodput_requests_per_s": good / outcome.seconds,
        "good_share": good / len(records),
        "cached_share": sum(record.cached for record in records) / sum(record.n_in for record in records),
        "utilisation": outcome.busy_seconds / outcome.replica_seconds,
        "mean_replicas": outcome.replica_seconds / outcome.seconds,
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
    }
    columns: dict[str, list[tuple[float, int]] | Gaps] = {
        "ttft": [(record.ttft, 1) for record in records],
        "tpot": [(record.tpot, 1) for record in records if record.tpot is not None],
        "itl": outcome.gaps,
        "e2e": [(record.e2e, 1) for record in records],
    }
    for name, values in columns.items():
        milliseconds = (
            [1e3 * value for value in weighted_percentiles(values, SHARES)] if values else [None] * len(SHARES)
        )
        for share, value in zip(SHARES, milliseconds, strict=True):
            row[f"{name}_p{share}_ms"] = value
    return row

"""The input and the outcome of a simulation, and the figures of a report."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import iadd
from typing import Any

from chairlift.core.targets import ServiceClass, Targets

SHARES = (50, 95, 99)  # percentiles of a report
COMPARED = (50, 90, 99)  # those of a comparison with measured times


@dataclass(frozen=True, slots=True)
class Arrival:
    time: float
    prompt: Sequence[int]  # tokens; equal prefixes are shared
    n_out: int
    tenant: str = ""
    service_class: ServiceClass | None = None


@dataclass(slots=True)
class RequestRecord:
    """The times of a request, in seconds on the virtual clock."""

    arrival: float
    n_in: int
    n_out: int
    replica: int
    first_token: float | None = None
    end: float | None = None
    cached: int = 0  # tokens of its prompt that it found in the prefix cache when it was first admitted
    tenant: str = ""
    service_class: ServiceClass | None = None

    @property
    def ttft(self) -> float:
        assert self.first_token is not None
        return self.first_token - self.arrival

    @property
    def e2e(self) -> float:
        assert self.end is not None
        return self.end - self.arrival

    @property
    def tpot(self) -> float | None:
        return (self.e2e - self.ttft) / (self.n_out - 1) if self.n_out > 1 else None

    def is_good(self, targets: Targets) -> bool:
        """Whether it met the targets of its class, or without a class these."""
        return (self.service_class.targets if self.service_class else targets).met_by(self)


class Gaps:
    """Inter-token times: (seconds, requests that waited that long) of every step, in flat arrays to save memory."""

    def __init__(self, pairs: Iterable[tuple[float, int]] = ()) -> None:
        self._seconds = array("d")
        self._counts = array("q")
        self.total_seconds = 0.0  # how long all requests together waited
        self.num_tokens = 0  # how many tokens they waited for
        for seconds, count in pairs:
            self.add(seconds, count)

    def __len__(self) -> int:
        return len(self._seconds)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return zip(self._seconds, self._counts, strict=True)

    def add(self, seconds: float, count: int) -> None:
        self._seconds.append(seconds)
        self._counts.append(count)
        self.total_seconds += seconds * count
        self.num_tokens += count

    def add_steps(self, seconds: Sequence[float], count: int) -> None:
        """Add several steps in which the same number of requests waited."""
        self._seconds.extend(seconds)
        self._counts.extend([count] * len(seconds))
        self.total_seconds += sum(seconds) * count
        self.num_tokens += count * len(seconds)

    def __iadd__(self, other: Gaps) -> Gaps:
        self._seconds.extend(other._seconds)
        self._counts.extend(other._counts)
        self.total_seconds += other.total_seconds
        self.num_tokens += other.num_tokens
        return self


@dataclass(slots=True)
class SimulationOutcome:
    records: list[RequestRecord] = field(default_factory=list)
    seconds: float = 0.0  # The last request ended after this.
    steps: int = 0
    busy_seconds: float = 0.0  # the sum over all replicas
    preemptions: int = 0
    gaps: Gaps = field(default_factory=Gaps)
    replica_seconds: float = 0.0  # the time that replicas ran or started, busy or not

    def add(self, other: SimulationOutcome) -> None:
        """Append an outcome that follows this one in time."""
        for name in self.__slots__:
            setattr(self, name, iadd(getattr(self, name), getattr(other, name)))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` percent of the values do not exceed."""
    return _percentiles(((value, 1) for value in values), [share])[0]


def _percentiles(values: Iterable[tuple[float, int]], shares: Sequence[float]) -> list[float]:
    """Percentiles of (value, count) pairs."""
    ordered = sorted(values)
    ranks = list(accumulate(count for _, count in ordered))
    return [ordered[min(bisect_left(ranks, share / 100 * ranks[-1]), len(ordered) - 1)][0] for share in shares]


def figures(outcome: SimulationOutcome, targets: Targets) -> dict[str, Any]:
    records = outcome.records
    tokens = sum(record.n_out for record in records)
    good = sum(record.is_good(targets) for record in records)
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
        percentiles = _percentiles(values, SHARES) if values else [None] * len(SHARES)
        for share, value in zip(SHARES, percentiles, strict=True):
            row[f"{name}_p{share}_ms"] = None if value is None else 1e3 * value
    return row


def attainment(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """The share of the requests of each class that met its targets."""
    by_class: dict[ServiceClass, list[RequestRecord]] = {}
    for record in records:
        if record.service_class is not None:
            by_class.setdefault(record.service_class, []).append(record)
    return {
        each.name: {
            "requests": len(members),
            "good_share": sum(each.targets.met_by(record) for record in members) / len(members),
            "ttft_p99_ms": 1e3 * percentile((record.ttft for record in members), 99),
            "e2e_p99_ms": 1e3 * percentile((record.e2e for record in members), 99),
        }
        for each, members in sorted(by_class.items(), key=lambda item: item[0].name)
    }


def latencies(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Means and percentiles in milliseconds, and the seconds from the first request to the last token."""
    columns = {
        "TTFT": [record.ttft for record in records],
        "TPOT": [record.tpot for record in records if record.tpot is not None],
        "latency": [record.e2e for record in records],
    }
    figures = {}
    for name, seconds in columns.items():
        figures[f"{name} mean, ms"] = 1e3 * sum(seconds) / len(seconds)
        figures |= {f"{name} p{share}, ms": 1e3 * percentile(seconds, share) for share in COMPARED}
    first = min(record.arrival for record in records)
    figures["whole run, s"] = max(record.arrival + record.e2e for record in records) - first
    return figures

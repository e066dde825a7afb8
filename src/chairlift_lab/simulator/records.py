"""The input and the outcome of a simulation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: Sequence[int]  # tokens; equal prefixes are shared
    n_out: int


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

    def update(self, other: Gaps) -> None:
        self._seconds.extend(other._seconds)
        self._counts.extend(other._counts)
        self.total_seconds += other.total_seconds
        self.num_tokens += other.num_tokens


@dataclass(slots=True)
class SimulationOutcome:
    records: list[RequestRecord] = field(default_factory=list)
    seconds: float = 0.0  # until the last request ended
    steps: int = 0
    busy_seconds: float = 0.0  # the sum over all replicas
    preemptions: int = 0
    gaps: Gaps = field(default_factory=Gaps)
    replica_seconds: float = 0.0  # the time that replicas ran or started, busy or not

    def add(self, other: SimulationOutcome) -> None:
        """Append an outcome that follows this one in time."""
        self.records.extend(other.records)
        self.seconds += other.seconds
        self.steps += other.steps
        self.busy_seconds += other.busy_seconds
        self.replica_seconds += other.replica_seconds
        self.preemptions += other.preemptions
        self.gaps.update(other.gaps)

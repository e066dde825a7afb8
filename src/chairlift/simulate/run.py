"""Requests over time, through a router, on many replicas."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chairlift.core.events import Event, RequestFinished, RequestPreempted, TokenProduced
from chairlift.core.request import Request
from chairlift.core.sampling import SamplingParams
from chairlift.simulate.replica import Replica
from chairlift.simulate.router import Router

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: Sequence[int]  # tokens; equal beginnings are shared
    n_out: int


@dataclass(slots=True)
class Record:
    """What became of a request. Times are seconds on the virtual clock."""

    arrival: float
    n_in: int
    n_out: int
    replica: int
    first_token: float | None = None
    end: float | None = None

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


@dataclass(slots=True)
class Outcome:
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # when the last request ended
    steps: int = 0
    busy_seconds: float = 0.0  # of all replicas together
    preemptions: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)  # (seconds, how often) between tokens of a request


def simulate(
    arrivals: Iterable[Arrival],
    replicas: Sequence[Replica],
    router: Router,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run all of `arrivals`, which come in the order of their time, to their end."""
    return _Run(replicas, router, progress).run(arrivals)


class _Run:
    def __init__(self, replicas: Sequence[Replica], router: Router, progress: Callable[[int], None]) -> None:
        self.replicas = replicas
        self.router = router
        self.progress = progress
        self.outcome = Outcome()
        self.open: dict[str, Record] = {}
        self.due: list[tuple[float, int, int]] = []  # (time, version, replica): a step ends, or a batch is released
        self.version = [0] * len(replicas)  # entries of `due` with an older one are void
        self.now = 0.0
        self.num_done = 0

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        coming = iter(arrivals)
        following = next(coming, None)
        while following is not None or self.due:
            if following is not None and (not self.due or following.at <= self.due[0][0]):
                self.now = following.at
                arrived, following = following, next(coming, None)
                self._admit(arrived, following.at if following else float("inf"))
                if following is None:
                    self._expect_no_more()
            else:
                self.now, version, index = heapq.heappop(self.due)
                if version == self.version[index]:
                    self._wake(index, following.at if following else float("inf"))
        outcome = self.outcome
        for replica in self.replicas:
            outcome.steps += replica.num_steps
            outcome.busy_seconds += replica.busy_seconds
            outcome.gaps += replica.gaps
        return outcome

    def _admit(self, arrival: Arrival, next_arrival: float) -> None:
        request_id = str(len(self.outcome.records))
        request = Request(request_id, arrival.prompt, GREEDY, max_new_tokens=arrival.n_out, arrival=self.now)
        index = self.router.choose(request, self.replicas)
        record = Record(self.now, len(arrival.prompt), arrival.n_out, index)
        self.outcome.records.append(record)
        self.open[request_id] = record
        replica = self.replicas[index]
        replica.submit(request, self.now)
        if not replica.busy:
            self._begin(index, next_arrival)

    def _expect_no_more(self) -> None:
        """Batches that wait to be filled need not any longer."""
        for index, replica in enumerate(self.replicas):
            replica.scheduler.expect_no_more()
            if not replica.busy:
                self._begin(index, float("inf"))

    def _wake(self, index: int, next_arrival: float) -> None:
        replica = self.replicas[index]
        if replica.busy:
            replica.end()
        self._begin(index, next_arrival)

    def _begin(self, index: int, next_arrival: float) -> None:
        self.version[index] += 1
        replica = self.replicas[index]
        due = replica.begin(self.now, next_arrival)
        for event in replica.scheduler.drain_events():
            self._note(event, replica)
        if due is not None:
            heapq.heappush(self.due, (due, self.version[index], index))

    def _note(self, event: Event, replica: Replica) -> None:
        if isinstance(event, TokenProduced):
            record = self.open[event.request_id]
            if record.first_token is None:
                record.first_token = event.time
        elif isinstance(event, RequestFinished):
            record = self.open.pop(event.request_id)
            record.end = event.time
            self.outcome.seconds = max(self.outcome.seconds, event.time)
            replica.load -= record.n_in + record.n_out
            self.num_done += 1
            self.progress(self.num_done)
        elif isinstance(event, RequestPreempted):
            self.outcome.preemptions += 1

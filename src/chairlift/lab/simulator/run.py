"""Simulates requests that a router distributes over replicas."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from chairlift.lab.simulator.records import Arrival, RequestRecord, SimulationOutcome
from chairlift.lab.simulator.replica import Replica
from chairlift.lab.simulator.router import ReplicaLoads, Router


def simulate(
    arrivals: Iterable[Arrival],
    replicas: Sequence[Replica],
    router: Router,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> SimulationOutcome:
    """Run all of `arrivals`, which are in order of time, to the end."""
    return _Run(replicas, router, progress).run(arrivals)


class _Run:
    def __init__(self, replicas: Sequence[Replica], router: Router, progress: Callable[[int], None]) -> None:
        self.replicas = replicas
        self.router = router
        self.progress = progress
        self.outcome = SimulationOutcome()
        self.loads = ReplicaLoads(len(replicas))
        self.due: list[tuple[float, int]] = []  # (time, replica), valid if the replica is still due then
        self.num_done = 0
        for replica in replicas:
            replica.on_end = self._note_end

    def run(self, arrivals: Iterable[Arrival]) -> SimulationOutcome:
        coming = iter(arrivals)
        following = next(coming, None)
        alone = len(self.replicas) == 1  # otherwise the replica of the next arrival is unknown
        until = math.inf
        while following is not None or self.due:
            if following is not None and (not self.due or following.at <= self.due[0][0]):
                arrived, following = following, next(coming, None)
                until = following.at if alone and following is not None else math.inf
                self._admit(arrived, until)
                if following is None:
                    self._expect_no_more(arrived.at)
            else:
                now, index = heapq.heappop(self.due)
                replica = self.replicas[index]
                if replica.due == now:
                    replica.wake(until)
                    if replica.due is not None:
                        heapq.heappush(self.due, (replica.due, index))
        return self._outcome()

    def _admit(self, arrival: Arrival, until: float) -> None:
        n_in, n_out = len(arrival.prompt), arrival.n_out
        index = self.router.choose(arrival, self.loads)
        record = RequestRecord(arrival.at, n_in, n_out, index)
        self.outcome.records.append(record)
        self.loads.change(index, n_in + n_out)
        replica = self.replicas[index]
        before = replica.due
        replica.submit(record, arrival.prompt, arrival.at, until)
        self._note_due(index, before)

    def _expect_no_more(self, now: float) -> None:
        for index, replica in enumerate(self.replicas):
            before = replica.due
            replica.expect_no_more(now)
            self._note_due(index, before)

    def _note_due(self, index: int, before: float | None) -> None:
        due = self.replicas[index].due
        if due is not None and due != before:
            heapq.heappush(self.due, (due, index))

    def _note_end(self, record: RequestRecord) -> None:
        self.loads.change(record.replica, -record.n_in - record.n_out)
        self.num_done += 1
        self.progress(self.num_done)

    def _outcome(self) -> SimulationOutcome:
        outcome = self.outcome
        outcome.seconds = max((record.end for record in outcome.records if record.end is not None), default=0.0)
        for replica in self.replicas:
            outcome.steps += replica.num_steps
            outcome.busy_seconds += replica.busy_seconds
            outcome.preemptions += replica.preemptions
            outcome.gaps.update(replica.gaps)
        return outcome

"""Simulates requests that a router distributes over replicas."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from chairlift.cluster.routing.prefix_keys import prefix_keys
from chairlift.cluster.routing.request import RoutedRequest
from chairlift.cluster.routing.router import Route, Router
from chairlift.lab.simulator.records import Arrival, RequestRecord, SimulationOutcome
from chairlift.lab.simulator.replica import Replica


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
        self.due: list[tuple[float, int]] = []  # (time, replica), valid if the replica is still due then
        self.num_done = 0
        self._routes: dict[int, Route] = {}  # of open requests, by the identity of their records
        for index, replica in enumerate(replicas):
            router.add(index, replica.num_cache_tokens)
            replica.on_start = self._note_start
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
        keys = prefix_keys(arrival.prompt) if self.router.policy.reads_prefixes else ()
        route = self.router.route(RoutedRequest(n_in, keys=keys))
        index = int(route.replica)
        record = RequestRecord(arrival.at, n_in, n_out, index)
        self._routes[id(record)] = route
        self.outcome.records.append(record)
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

    def _note_start(self, record: RequestRecord) -> None:
        self.router.started(self._routes[id(record)])

    def _note_end(self, record: RequestRecord) -> None:
        self.router.ended(self._routes.pop(id(record)), record.n_out)
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

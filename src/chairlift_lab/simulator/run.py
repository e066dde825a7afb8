"""Simulates requests that a router distributes over replicas."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from chairlift.cluster.routing.replicas import RoutedRequest, prefix_keys
from chairlift.cluster.routing.router import Route, Router
from chairlift_lab.simulator.fleet import FixedSize, FleetSize, Ingresses
from chairlift_lab.simulator.records import Arrival, RequestRecord, SimulationOutcome
from chairlift_lab.simulator.replica import Replica


def simulate(
    arrivals: Iterable[Arrival],
    replicas: Sequence[Replica],
    router: Router,
    *,
    size: FleetSize | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> SimulationOutcome:
    """Run all of `arrivals`, which are in order of time, to the end; `size` may add and remove replicas."""
    return _Run(replicas, router, size or FixedSize(), progress).run(arrivals)


class _Run:
    """Replicas are known by their index: each has its own, also after others have left."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, size: FleetSize, progress: Callable[[int], None]
    ) -> None:
        self.replicas: list[Replica] = []
        self.router = router
        self.size = size
        self.progress = progress
        self.outcome = SimulationOutcome()
        self.due: list[tuple[float, int]] = []  # (time, replica), valid if the replica is still due then
        self.num_done = 0
        self._routes: dict[int, Route] = {}  # the route of each open request, by the identity of its record
        self._expects_more = True
        self._unrouted: list[Arrival] = []  # requests that came while there was no replica
        for replica in replicas:
            self.add(replica, 0.0)

    def run(self, arrivals: Iterable[Arrival]) -> SimulationOutcome:
        coming = iter(arrivals)
        following = next(coming, None)
        # Otherwise the replica of the next arrival is unknown.
        alone = len(self.replicas) == 1 and isinstance(self.size, FixedSize)
        until = math.inf
        while following is not None or self.due or self._unrouted:
            next_arrival = following.at if following is not None else math.inf
            next_step = self.due[0][0] if self.due else math.inf
            if self.size.next_change <= min(next_arrival, next_step):
                self.size.change(self, self.size.next_change)
            elif following is not None and next_arrival <= next_step:
                arrived, following = following, next(coming, None)
                until = following.at if alone and following is not None else math.inf
                self._route(arrived, arrived.at, until)
                if following is None:
                    self._expect_no_more(arrived.at)
            else:
                self._wake(until)
        return self._outcome()

    # ---- the fleet ----------------------------------------------------------------------------------------------

    def add(self, replica: Replica, now: float) -> int:
        """Add a replica that is ready; requests that came before the first one are sent to it."""
        index = len(self.replicas)
        self.replicas.append(replica)
        self.router.add(index, replica.num_cache_tokens)
        replica.on_start = self._note_start
        replica.on_end = self._note_end
        waiting, self._unrouted = self._unrouted, []
        for arrival in waiting:
            self._route(arrival, now, math.inf)
        if not self._expects_more:
            self._expect_no_more(now)
        return index

    def remove(self, index: int) -> None:
        """Send no more requests to a replica; it ends those that it has."""
        self.router.remove(index)

    @property
    def num_open(self) -> int:
        return len(self._routes) + len(self._unrouted)

    # ---- requests -----------------------------------------------------------------------------------------------

    def _route(self, arrival: Arrival, now: float, until: float) -> None:
        if not len(self.router.loads):
            self._unrouted.append(arrival)
            return
        if isinstance(self.router, Ingresses):
            self.router.pass_time(now)
        n_in, n_out = len(arrival.prompt), arrival.n_out
        keys = prefix_keys(arrival.prompt) if self.router.policy.reads_prefixes else ()
        route = self.router.route(RoutedRequest(n_in, keys=keys))
        index = int(route.replica)
        record = RequestRecord(arrival.at, n_in, n_out, index)
        self._routes[id(record)] = route
        self.outcome.records.append(record)
        self.size.arrived(record)
        replica = self.replicas[index]
        before = replica.due
        replica.submit(record, arrival.prompt, now, until)
        self._note_due(index, before)

    def _wake(self, until: float) -> None:
        now, index = heapq.heappop(self.due)
        replica = self.replicas[index]
        if replica.due == now:
            replica.wake(until)
            if replica.due is not None:
                heapq.heappush(self.due, (replica.due, index))

    def _expect_no_more(self, now: float) -> None:
        self._expects_more = False
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
        self.size.started(record)

    def _note_end(self, record: RequestRecord) -> None:
        self.router.ended(self._routes.pop(id(record)), record.n_out)
        self.num_done += 1
        self.progress(self.num_done)

    def _outcome(self) -> SimulationOutcome:
        outcome = self.outcome
        outcome.seconds = max((record.end for record in outcome.records if record.end is not None), default=0.0)
        outcome.replica_seconds = self.size.replica_seconds(self, outcome.seconds)
        for replica in self.replicas:
            outcome.steps += replica.num_steps
            outcome.busy_seconds += replica.busy_seconds
            outcome.preemptions += replica.preemptions
            outcome.gaps.update(replica.gaps)
        return outcome

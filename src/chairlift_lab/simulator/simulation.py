"""Simulates requests that a router distributes over replicas, whose number is fixed or decided by the autoscaler."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Iterable, Sequence
from heapq import heappop, heappush

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait
from chairlift.cluster.routing.router import ReplicaId, Route, RoutedRequest, Router, prefix_keys
from chairlift_lab.simulator.outcome import Arrival, RequestRecord, SimulationOutcome
from chairlift_lab.simulator.replica import Replica

REPORT_SECONDS = 1.0  # The replicas report this often to all ingresses, as in the cluster.
DECISION_SECONDS = 5.0  # The autoscaler decides this often.


def simulate(
    arrivals: Iterable[Arrival],
    replicas: Sequence[Replica],
    router: Router,
    *,
    size: AutoscaledSize | None = None,
    on_end: Callable[[RequestRecord], object] = lambda record: None,
) -> SimulationOutcome:
    """Run all of `arrivals`, which are in order of time, to the end; `size` may add and remove replicas. `on_end` is
    called with each request that ends."""
    return Fleet(replicas, router, size, on_end).run(arrivals)


class Fleet:
    """Replicas behind a router. Each is known by its index, also after others have left."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        size: AutoscaledSize | None,
        on_end: Callable[[RequestRecord], object],
    ) -> None:
        self.replicas: list[Replica] = []
        self.router = router
        self.open: dict[int, tuple[RequestRecord, Route]] = {}  # requests without an end, by the identity of the record
        self.unrouted: list[Arrival] = []  # requests that came while there was no replica
        self._size = size
        self._on_end = on_end
        self._outcome = SimulationOutcome()
        self._due: list[tuple[float, int]] = []  # (time, replica), valid if the replica is still due then
        self._expects_more = True
        for replica in replicas:
            self.add(replica, 0.0)

    def run(self, arrivals: Iterable[Arrival]) -> SimulationOutcome:
        pending = iter(arrivals)
        following = next(pending, None)
        # Otherwise the replica of the next arrival is unknown.
        alone = len(self.replicas) == 1 and self._size is None
        until = math.inf
        while following is not None or self._due or self.unrouted:
            next_arrival = following.time if following is not None else math.inf
            next_step = self._due[0][0] if self._due else math.inf
            if self._size is not None and self._size.next_change <= min(next_arrival, next_step):
                self._size.change(self, self._size.next_change)
            elif following is not None and next_arrival <= next_step:
                arrived, following = following, next(pending, None)
                until = following.time if alone and following is not None else math.inf
                self._route(arrived, arrived.time, until)
                if following is None:
                    self._expect_no_more(arrived.time)
            else:
                self._wake(until)
        return self._finish()

    def add(self, replica: Replica, now: float) -> None:
        """Add a replica that is ready; requests that came before the first one are sent to it."""
        self.replicas.append(replica)
        self.router.add(len(self.replicas) - 1, replica.num_cache_tokens)
        replica.scheduler.on_start = self._note_start
        replica.scheduler.on_end = self._note_end
        waiting, self.unrouted = self.unrouted, []
        for arrival in waiting:
            self._route(arrival, now, math.inf)
        if not self._expects_more:
            self._expect_no_more(now)

    def _route(self, arrival: Arrival, now: float, until: float) -> None:
        if not len(self.router.loads):
            self.unrouted.append(arrival)
            return
        if isinstance(self.router, Ingresses):
            self.router.pass_time(now)
        n_in, n_out = len(arrival.prompt), arrival.n_out
        keys = prefix_keys(arrival.prompt) if self.router.policy.reads_prefixes else ()
        route = self.router.route(RoutedRequest(n_in, keys=keys))
        index = int(route.replica)
        record = RequestRecord(
            arrival.time, n_in, n_out, index, tenant=arrival.tenant, service_class=arrival.service_class
        )
        self.open[id(record)] = record, route
        self._outcome.records.append(record)
        replica = self.replicas[index]
        before = replica.due
        replica.submit(record, arrival.prompt, now, until)
        self._note_due(index, before)

    def _wake(self, until: float) -> None:
        now, index = heappop(self._due)
        replica = self.replicas[index]
        if replica.due == now:
            replica.wake(until)
            self._note_due(index, None)

    def _expect_no_more(self, now: float) -> None:
        self._expects_more = False
        for index, replica in enumerate(self.replicas):
            before = replica.due
            replica.expect_no_more(now)
            self._note_due(index, before)

    def _note_due(self, index: int, before: float | None) -> None:
        due = self.replicas[index].due
        if due is not None and due != before:
            heappush(self._due, (due, index))

    def _note_start(self, record: RequestRecord) -> None:
        self.router.started(self.open[id(record)][1])

    def _note_end(self, record: RequestRecord) -> None:
        self.router.ended(self.open.pop(id(record))[1], record.n_out)
        self._on_end(record)

    def _finish(self) -> SimulationOutcome:
        outcome = self._outcome
        outcome.seconds = seconds = max((record.end or 0.0 for record in outcome.records), default=0.0)
        size = self._size
        outcome.replica_seconds = len(self.replicas) * seconds if size is None else size.replica_seconds(self, seconds)
        for replica in self.replicas:
            outcome.steps += replica.num_steps
            outcome.busy_seconds += replica.busy_seconds
            outcome.preemptions += replica.scheduler.preemptions
            outcome.gaps += replica.gaps
        return outcome


class AutoscaledSize:
    """Asks the autoscaler every few seconds; a new replica is ready after its cold start, which is paid for too."""

    def __init__(self, settings: AutoscalingSettings, make_replica: Callable[[int], Replica]) -> None:
        self._autoscaler = Autoscaler(settings)
        self._make_replica = make_replica
        self._cold_start = settings.cold_start
        self._next_decision = 0.0
        self._starting: list[float] = []  # times at which new replicas are ready
        self._paid = 0.0  # replica-seconds up to `_paid_until`
        self._paid_until = 0.0
        self._waited = (0.0, 0)  # waiting for tokens up to the last decision: seconds, and tokens
        self._leaving: list[int] = []  # removed replicas that still have requests

    @property
    def next_change(self) -> float:
        """When to call `change`."""
        return min(self._next_decision, self._starting[0] if self._starting else math.inf)

    def change(self, fleet: Fleet, now: float) -> None:
        self._pay(fleet, now)
        while self._starting and self._starting[0] <= now:
            heappop(self._starting)
            fleet.add(self._make_replica(len(fleet.replicas)), now)
        if self._next_decision <= now:
            self._decide(fleet, now)
            self._next_decision = now + DECISION_SECONDS

    def _decide(self, fleet: Fleet, now: float) -> None:
        loads = fleet.router.loads
        observation = FleetObservation(
            len(loads),
            self._wait(fleet, now),
            loads.used_share(),
            self._recent_tpot(fleet),
            open_requests=len(fleet.open) + len(fleet.unrouted),
        )
        change = self._autoscaler.desired(observation, now) - len(loads) - len(self._starting)
        for _ in range(change):
            heappush(self._starting, now + self._cold_start)
        # A replica that leaves gets no more requests, and ends those that it has.
        for index in sorted(loads, key=loads.rank)[: max(0, -change)]:
            fleet.router.remove(index)
            self._leaving.append(int(index))

    def _wait(self, fleet: Fleet, now: float) -> float:
        """The age of the oldest request without a first token, by replica."""
        waits: dict[ReplicaId, float] = dict.fromkeys(fleet.router.loads, 0.0)
        for record, _ in fleet.open.values():
            if record.first_token is None:
                waits[record.replica] = max(waits.get(record.replica, 0.0), now - record.arrival)
        return fleet_wait(waits.values())

    def _recent_tpot(self, fleet: Fleet) -> float | None:
        """The mean seconds per output token since the last decision."""
        seconds = sum(replica.gaps.total_seconds for replica in fleet.replicas)
        tokens = sum(replica.gaps.num_tokens for replica in fleet.replicas)
        (seconds_before, tokens_before), self._waited = self._waited, (seconds, tokens)
        return (seconds - seconds_before) / (tokens - tokens_before) if tokens > tokens_before else None

    def _pay(self, fleet: Fleet, now: float) -> None:
        self._leaving = [index for index in self._leaving if fleet.replicas[index].due is not None]
        running = len(fleet.router.loads) + len(self._starting) + len(self._leaving)
        self._paid += running * (now - self._paid_until)
        self._paid_until = now

    def replica_seconds(self, fleet: Fleet, end: float) -> float:
        self._pay(fleet, max(end, self._paid_until))
        return self._paid


class Ingresses(Router):
    """Ingresses that get requests in turn, or all with the same first tokens (of a tenant) at the same ingress.

    The router of each knows what it sent itself, and learns from the replicas' reports what the others sent. The
    loads of this object are the true ones.
    """

    def __init__(self, policy: str, count: int, *, by_tenant: bool = False) -> None:
        super().__init__(policy)
        self._routers = [Router(policy) for _ in range(count)]
        if count > 1:
            for seed, router in enumerate(self._routers):
                router.loads.draw = random.Random(seed)
        self._by_tenant = by_tenant
        self._router_of: dict[int, Router] = {}  # the router of each open request, by the identity of its route
        self._turn = 0
        self._next_report = REPORT_SECONDS

    def add(self, replica: ReplicaId, num_tokens: int) -> None:
        super().add(replica, num_tokens)
        for router in self._routers:
            router.add(replica, num_tokens)

    def remove(self, replica: ReplicaId) -> None:
        super().remove(replica)
        for router in self._routers:
            router.remove(replica)

    def pass_time(self, now: float) -> None:
        """Let the replicas report their loads if it is time."""
        if now < self._next_report:
            return
        self._next_report = now + REPORT_SECONDS
        for replica in self.loads:
            pending, held = self.loads[replica], self.loads.held_tokens(replica)
            for router in self._routers:
                router.loads.report(replica, pending, held)

    def route(self, request: RoutedRequest, excluded: Container[ReplicaId] = ()) -> Route:
        if self._by_tenant and request.keys:
            ingress = int.from_bytes(request.keys[0].digest[:8], "little")
        else:
            ingress = self._turn = self._turn + 1
        router = self._routers[ingress % len(self._routers)]
        route = router.route(request, excluded)
        self._router_of[id(route)] = router
        self.loads.change(route.replica, route.prompt_cost + route.output_cost, route.num_tokens, route.num_tokens)
        return route

    def started(self, route: Route) -> None:
        if not route.started and route.replica in self.loads:
            self.loads.change(route.replica, -route.prompt_cost)
        self._router_of[id(route)].started(route)

    def ended(self, route: Route, num_output: int | None = None) -> None:
        if route.replica in self.loads:
            left = route.output_cost + (0 if route.started else route.prompt_cost)
            self.loads.change(route.replica, -left, -route.num_tokens)
        self._router_of.pop(id(route)).ended(route, num_output)

"""The ingresses in front of a simulated fleet, and its size: fixed, or as the cluster's autoscaler decides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container
from heapq import heappop, heappush
from typing import Protocol

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait
from chairlift.cluster.routing.replicas import ReplicaId, ReplicaLoads, RoutedRequest
from chairlift.cluster.routing.router import Route, Router
from chairlift_lab.simulator.records import RequestRecord
from chairlift_lab.simulator.replica import Replica

REPORT_SECONDS = 1.0  # between two reports of the replicas to all ingresses, as in the cluster
INTERVAL = 5.0  # seconds between two decisions


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
        router = self._routers[self._ingress_of(request)]
        route = router.route(request, excluded)
        self._router_of[id(route)] = router
        self.loads.change(route.replica, route.prompt_cost + route.output_cost, route.num_tokens, route.num_tokens)
        return route

    def _ingress_of(self, request: RoutedRequest) -> int:
        if self._by_tenant and request.keys:
            return int.from_bytes(request.keys[0].digest[:8], "little") % len(self._routers)
        self._turn = (self._turn + 1) % len(self._routers)
        return self._turn

    def started(self, route: Route) -> None:
        if not route.started and route.replica in self.loads:
            self.loads.change(route.replica, -route.prompt_cost)
        self._router_of[id(route)].started(route)

    def ended(self, route: Route, num_output: int | None = None) -> None:
        if route.replica in self.loads:
            left = route.output_cost + (0 if route.started else route.prompt_cost)
            self.loads.change(route.replica, -left, -route.num_tokens)
        self._router_of.pop(id(route)).ended(route, num_output)


class Fleet(Protocol):
    """The running simulation, as far as its size is concerned."""

    router: Router
    replicas: list[Replica]

    @property
    def num_open(self) -> int: ...
    def add(self, replica: Replica, now: float) -> int: ...
    def remove(self, index: int) -> None: ...


class FleetSize(Protocol):
    @property
    def next_change(self) -> float:
        """When to call `change`."""

    def change(self, fleet: Fleet, now: float) -> None: ...
    def arrived(self, record: RequestRecord) -> None: ...
    def started(self, record: RequestRecord) -> None: ...
    def replica_seconds(self, fleet: Fleet, end: float) -> float: ...


class FixedSize:
    next_change = math.inf

    def change(self, fleet: Fleet, now: float) -> None: ...
    def arrived(self, record: RequestRecord) -> None: ...
    def started(self, record: RequestRecord) -> None: ...

    def replica_seconds(self, fleet: Fleet, end: float) -> float:
        return len(fleet.replicas) * end


class AutoscaledSize:
    """Asks the autoscaler every few seconds; a new replica is ready after its cold start, which is paid for too."""

    def __init__(self, settings: AutoscalingSettings, make_replica: Callable[[int], Replica]) -> None:
        self._autoscaler = Autoscaler(settings)
        self._make_replica = make_replica
        self._cold_start = settings.cold_start
        self._next_decision = 0.0
        self._starting: list[float] = []  # times at which new replicas are ready
        self._waiting: dict[int, RequestRecord] = {}  # requests without a first token, oldest first
        self._paid = 0.0  # replica-seconds up to `_paid_until`
        self._paid_until = 0.0
        self._waited = (0.0, 0)  # waiting for tokens up to the last decision: seconds, and tokens
        self._leaving: list[int] = []  # removed replicas that still have requests

    @property
    def next_change(self) -> float:
        return min(self._next_decision, self._starting[0] if self._starting else math.inf)

    def change(self, fleet: Fleet, now: float) -> None:
        self._pay(fleet, now)
        while self._starting and self._starting[0] <= now:
            heappop(self._starting)
            fleet.add(self._make_replica(len(fleet.replicas)), now)
        if self._next_decision <= now:
            self._decide(fleet, now)
            self._next_decision = now + INTERVAL

    def _decide(self, fleet: Fleet, now: float) -> None:
        loads = fleet.router.loads
        seen = FleetObservation(
            len(loads),
            self._wait(loads, now),
            loads.used_share(),
            self._recent_tpot(fleet),
            open_requests=fleet.num_open,
        )
        change = self._autoscaler.desired(seen, now) - len(loads) - len(self._starting)
        for _ in range(change):
            heappush(self._starting, now + self._cold_start)
        for index in sorted(loads, key=loads.rank)[: max(0, -change)]:
            fleet.remove(int(index))
            self._leaving.append(int(index))

    def _wait(self, loads: ReplicaLoads, now: float) -> float:
        """The age of the oldest request without a first token, by replica."""
        waits: dict[ReplicaId, float] = dict.fromkeys(loads, 0.0)
        for record in self._waiting.values():
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

    def arrived(self, record: RequestRecord) -> None:
        self._waiting[id(record)] = record

    def started(self, record: RequestRecord) -> None:
        del self._waiting[id(record)]

    def replica_seconds(self, fleet: Fleet, end: float) -> float:
        self._pay(fleet, max(end, self._paid_until))
        return self._paid

"""How many replicas a simulated fleet has: always the same, or as the cluster's autoscaler decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait
from chairlift.cluster.routing.replicas import ReplicaId, ReplicaLoads
from chairlift.cluster.routing.router import Router
from chairlift_lab.simulator.records import RequestRecord
from chairlift_lab.simulator.replica import Replica

INTERVAL = 5.0  # seconds between two decisions


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
        self._waited = (0.0, 0)  # for tokens up to the last decision: seconds, and tokens
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

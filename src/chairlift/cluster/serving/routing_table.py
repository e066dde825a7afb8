"""The replicas that an ingress knows, and the choice among them. Ray Serve keeps it up to date from another thread."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from chairlift.cluster.routing.request import RoutedRequest
from chairlift.cluster.routing.router import Route, Router
from chairlift.cluster.serving.replica_load import ReplicaInfo, ReplicaLoad

SUSPECT_SECONDS = 5.0  # for which a replica that failed is avoided; Ray Serve removes dead ones within a few seconds


@dataclass(slots=True)
class KnownReplica:
    """A replica as an ingress sees it."""

    id: str
    info: ReplicaInfo
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    suspect_until: float = 0.0  # on the monotonic clock

    @property
    def state(self) -> str:
        if self.suspect_until > time.monotonic():
            return "failing"
        return "ready" if self.load.is_ready else "restarting"


class NoReplica(Exception):
    """There is no replica to send a request to."""


class RoutingTable:
    def __init__(self, policy: str) -> None:
        self._router = Router(policy)
        self._replicas: dict[str, KnownReplica] = {}
        self._doubtful: set[str] = set()  # may not be ready; all others are, so that a choice need not look at all
        self._lock = threading.Lock()
        self.reads_prefixes = self._router.policy.reads_prefixes

    def share_replicas(self) -> None:
        """Expect that other ingresses send requests to the same replicas."""
        self._router.loads.draw = random.Random()

    def update(self, seen: Iterable[tuple[str, ReplicaInfo, ReplicaLoad | None]]) -> None:
        """Take the replicas that are running now, with their last reported load."""
        with self._lock:
            current = {replica: (info, load) for replica, info, load in seen}
            for replica in self._replicas.keys() - current.keys():
                del self._replicas[replica]
                self._doubtful.discard(replica)
                self._router.remove(replica)
            for replica, (info, load) in current.items():
                if replica not in self._replicas:
                    self._replicas[replica] = KnownReplica(replica, info)
                    self._router.add(replica, info.num_tokens)
                if load is not None and load != self._replicas[replica].load:
                    self._replicas[replica].load = load
                    if not load.is_ready:
                        self._doubtful.add(replica)
                    self._router.loads.report(replica, load.pending_tokens, load.held_tokens)

    def replicas(self) -> list[KnownReplica]:
        with self._lock:
            return list(self._replicas.values())

    def route(self, request: RoutedRequest, avoided: Collection[str] = ()) -> tuple[KnownReplica, Route]:
        """Choose a replica. One that is `avoided`, failing or restarting is only taken if there is no other."""
        with self._lock:
            if not self._replicas:
                raise NoReplica
            self._doubtful = {one for one in self._doubtful if self._replicas[one].state != "ready"}
            bad = self._doubtful | {one for one in avoided if one in self._replicas}
            if len(bad) == len(self._replicas):
                bad = {one for one in avoided if one in self._replicas}
            if len(bad) == len(self._replicas):
                bad = set()
            route = self._router.route(request, bad)
            return self._replicas[str(route.replica)], route

    def started(self, route: Route) -> None:
        with self._lock:
            self._router.started(route)

    def ended(self, route: Route, num_output: int | None = None) -> None:
        with self._lock:
            self._router.ended(route, num_output)

    def failed(self, replica: str) -> None:
        """Avoid a replica that did not answer, until Ray Serve has found out about it."""
        with self._lock:
            if replica in self._replicas:
                self._replicas[replica].suspect_until = time.monotonic() + SUSPECT_SECONDS
                self._doubtful.add(replica)


_tables: dict[str, RoutingTable] = {}  # of this process, by policy


def routing_table(policy: str) -> RoutingTable:
    """The table of this process, which is empty until Ray Serve has sent the replicas."""
    return _tables.setdefault(policy, RoutingTable(policy))

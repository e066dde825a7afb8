"""Every replica in turn."""

from __future__ import annotations

from collections.abc import Container

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.policies.base import RoutingPolicy
from chairlift.cluster.routing.router import ReplicaId, ReplicaLoads, RoutedRequest


@ROUTERS.register("round-robin")
class RoundRobin(RoutingPolicy):
    name = "round-robin"

    def __init__(self) -> None:
        self._replicas: list[ReplicaId] = []
        self._turn = -1

    def choose(self, request: RoutedRequest, loads: ReplicaLoads, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        while True:
            self._turn = (self._turn + 1) % len(self._replicas)
            if self._replicas[self._turn] not in excluded:
                return self._replicas[self._turn]

    def added(self, replica: ReplicaId, num_tokens: int) -> None:
        self._replicas.append(replica)

    def removed(self, replica: ReplicaId) -> None:
        self._replicas.remove(replica)

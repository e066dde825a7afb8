"""Every replica in turn."""

from __future__ import annotations

from collections.abc import Container

from chairlift.cluster.routing.loads import ReplicaId, ReplicaLoads
from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.policies.base import RoutingPolicy
from chairlift.cluster.routing.request import RoutedRequest


@ROUTERS.register("round-robin")
class RoundRobin(RoutingPolicy):
    name = "round-robin"

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RoutedRequest, loads: ReplicaLoads, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        replicas = [replica for replica in loads if replica not in excluded]
        self._turn = (self._turn + 1) % len(replicas)
        return replicas[self._turn]

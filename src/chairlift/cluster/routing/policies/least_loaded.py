"""The replica with the fewest tokens still to compute."""

from __future__ import annotations

from collections.abc import Container

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.policies.base import RoutingPolicy
from chairlift.cluster.routing.router import ReplicaId, ReplicaLoads, RoutedRequest


@ROUTERS.register("least-loaded")
class LeastLoaded(RoutingPolicy):
    name = "least-loaded"

    def choose(self, request: RoutedRequest, loads: ReplicaLoads, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        return loads.least(excluded)

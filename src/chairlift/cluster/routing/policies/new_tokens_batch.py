"""The replica with the least product of the tokens to compute before the request's first one and its batch."""

from __future__ import annotations

from collections.abc import Container

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.policies.prefix_affine import PrefixAffine
from chairlift.cluster.routing.router import ReplicaId, ReplicaLoads, RoutedRequest

MAX_COMPARED = 64  # In a larger fleet only the candidates of `prefix-affine` are compared: it bounds a choice's time.


@ROUTERS.register("new-tokens-batch")
class NewTokensBatch(PrefixAffine):
    """Like `prefix-affine`, but what must be computed is multiplied by the number of requests that would share its
    steps: a replica with many requests is slower for the new one, and is slowed down for all of them."""

    name = "new-tokens-batch"

    def choose(self, request: RoutedRequest, loads: ReplicaLoads, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        if len(loads) > MAX_COMPARED or loads.draw is not None:  # Several routers would all choose the same replica.
            return super().choose(request, loads, excluded)
        costs = {
            replica: self._cost(request, self.num_held(replica, request.keys), replica, loads)
            for replica in loads
            if replica not in excluded
        }
        return min(costs, key=lambda replica: (costs[replica], *loads.rank(replica)))

    @staticmethod
    def _cost(request: RoutedRequest, held: int, replica: ReplicaId, loads: ReplicaLoads) -> int:
        return PrefixAffine._cost(request, held, replica, loads) * (1 + loads.num_open(replica))

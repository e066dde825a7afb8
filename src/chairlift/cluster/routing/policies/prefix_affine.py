"""The replica that can answer first, counting the part of the prompt that it has in its cache.

The cost of a replica is the work before the request's first token there: what it still has to compute, the part of the
prompt that it does not hold, and the memory that must be freed first, all in tokens. A shared system prompt is worth
its own length and no more, so it does not bind all traffic to one replica: once the backlog there exceeds what the
cached prefix saves, another replica takes the request, and holds that prefix too from then on.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.policies.base import RoutingPolicy
from chairlift.cluster.routing.router import PrefixKey, PrefixMap, ReplicaId, ReplicaLoads, RoutedRequest

MAX_CANDIDATES = 8  # replicas with the longest held prefixes that are compared; bounds the time of a choice


@ROUTERS.register("prefix-affine")
class PrefixAffine(RoutingPolicy):
    name = "prefix-affine"
    reads_prefixes = True

    def __init__(self) -> None:
        self._map = PrefixMap()

    def choose(self, request: RoutedRequest, loads: ReplicaLoads, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        holders = ((replica, held) for replica, held in self._map.holders(request.keys) if replica not in excluded)
        costs = {
            replica: self._cost(request, held, replica, loads) for replica, held in islice(holders, MAX_CANDIDATES)
        }
        idlest = loads.least(excluded)
        costs.setdefault(idlest, self._cost(request, 0, idlest, loads))
        return min(costs, key=lambda replica: (costs[replica], *loads.rank(replica)))

    @staticmethod
    def _cost(request: RoutedRequest, held: int, replica: ReplicaId, loads: ReplicaLoads) -> int:
        to_compute = request.num_prompt - held
        return loads[replica] + to_compute + max(0, to_compute - loads.free_tokens(replica))

    def num_held(self, replica: ReplicaId, keys: tuple[PrefixKey, ...]) -> int:
        return self._map.num_held(replica, keys)

    def routed(self, request: RoutedRequest, replica: ReplicaId, num_output: int) -> None:
        self._map.record(replica, request.keys, request.num_prompt + num_output)

    def added(self, replica: ReplicaId, num_tokens: int) -> None:
        self._map.add(replica, num_tokens)

    def removed(self, replica: ReplicaId) -> None:
        self._map.remove(replica)

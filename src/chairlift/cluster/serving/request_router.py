"""Ray Serve's request router that asks ours: it follows the replicas and fills the routing table of its process.

    Ray Serve's controller ── replicas, their metadata and routing stats ──> FleetRequestRouter ──> RoutingTable
                                                                                                       ^
                                                              the ingress asks it for every request ───┘

Calls through Ray's handles (`choose_replicas`) use the same table. Ray Serve copies this module by value, so that the
table is kept by another one.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from chairlift.cluster.routing.router import RoutedRequest
from chairlift.cluster.serving.routing_table import NoReplica, ReplicaInfo, ReplicaLoad, routing_table


class FleetRequestRouter(RequestRouter):
    def initialize_state(self, policy: str) -> None:
        self._table = routing_table(policy)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.update(
            (
                replica.replica_id.unique_id,
                ReplicaInfo(**replica.replica_metadata),
                ReplicaLoad.from_dict(replica.routing_stats) if replica.routing_stats else None,
            )
            for replica in replicas
            if replica.replica_metadata
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Put our choice before all others; a call whose first argument is a `RoutedRequest` is routed by it."""
        given: Any = pending_request.args[0] if pending_request is not None and pending_request.args else None
        request = given if isinstance(given, RoutedRequest) else RoutedRequest(0, 0)
        try:
            chosen, route = self._table.route(request)
        except NoReplica:
            return [candidate_replicas]
        self._table.ended(route)  # Ray counts its own calls
        first = [one for one in candidate_replicas if one.replica_id.unique_id == chosen.id]
        return [first, [one for one in candidate_replicas if one not in first]]

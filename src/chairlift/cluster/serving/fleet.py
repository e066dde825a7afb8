"""The fleet as an ingress sees it: what `cluster status`, the metrics and the dashboard of the fleet are made from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from chairlift.cluster.serving.routing_table import KnownReplica, RoutingTable


class FleetView:
    """The replicas of a fleet, as one ingress sees them."""

    def __init__(self, table: RoutingTable, router: str) -> None:
        self._table = table
        self.router = router

    def replicas(self) -> list[KnownReplica]:
        return self._table.replicas()

    @property
    def is_ready(self) -> bool:
        return any(replica.state == "ready" for replica in self._table.replicas())

    def describe(self) -> list[dict[str, Any]]:
        """Each replica with its address, state, version and load."""
        found = []
        for replica in self._table.replicas():
            info = asdict(replica.info)
            del info["key"]
            load = replica.load.as_dict() | {"hit_rate": replica.load.hit_rate}
            found.append({"id": replica.id, "state": replica.state, **info, "load": load})
        return found

"""The interface of a routing policy."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from chairlift.cluster.routing.router import PrefixKey, ReplicaId, ReplicaLoads, RoutedRequest


class RoutingPolicy:
    """Chooses one of the replicas in `loads`; a policy that compares prompts also keeps what each replica holds."""

    name: ClassVar[str]
    reads_prefixes: ClassVar[bool] = False  # otherwise requests need no keys, and prompts need not be tokenized

    def choose(self, request: RoutedRequest, loads: ReplicaLoads, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        """The replica for `request`. At least one replica is not in `excluded`."""
        raise NotImplementedError

    def num_held(self, replica: ReplicaId, keys: tuple[PrefixKey, ...]) -> int:
        """How many of the first tokens of a prompt `replica` probably has in its KV cache."""
        return 0

    # Notifications from the router, which most policies do not need.

    def routed(self, request: RoutedRequest, replica: ReplicaId, num_output: int) -> None: ...
    def added(self, replica: ReplicaId, num_tokens: int) -> None: ...
    def removed(self, replica: ReplicaId) -> None: ...

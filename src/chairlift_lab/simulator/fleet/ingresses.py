"""Several ingresses in front of one fleet, each with a router of its own."""

from __future__ import annotations

import random
from collections.abc import Container

from chairlift.cluster.routing.replicas import ReplicaId, RoutedRequest
from chairlift.cluster.routing.router import Route, Router

REPORT_SECONDS = 1.0  # between two reports of the replicas to all ingresses, as in the cluster


class Ingresses(Router):
    """Ingresses that get requests in turn, or all with the same first tokens (of a tenant) at the same ingress.

    The router of each knows what it sent itself, and learns from the replicas' reports what the others sent. The
    loads of this object are the true ones.
    """

    def __init__(self, policy: str, count: int, *, by_tenant: bool = False) -> None:
        super().__init__(policy)
        self._routers = [Router(policy) for _ in range(count)]
        if count > 1:
            for seed, router in enumerate(self._routers):
                router.loads.draw = random.Random(seed)
        self._by_tenant = by_tenant
        self._router_of: dict[int, Router] = {}  # of open requests, by the identity of their routes
        self._turn = 0
        self._next_report = REPORT_SECONDS

    def add(self, replica: ReplicaId, num_tokens: int) -> None:
        super().add(replica, num_tokens)
        for router in self._routers:
            router.add(replica, num_tokens)

    def remove(self, replica: ReplicaId) -> None:
        super().remove(replica)
        for router in self._routers:
            router.remove(replica)

    def pass_time(self, now: float) -> None:
        """Let the replicas report their loads if it is time."""
        if now < self._next_report:
            return
        self._next_report = now + REPORT_SECONDS
        for replica in self.loads:
            pending, held = self.loads[replica], self.loads.held_tokens(replica)
            for router in self._routers:
                router.loads.report(replica, pending, held)

    def route(self, request: RoutedRequest, excluded: Container[ReplicaId] = ()) -> Route:
        router = self._routers[self._ingress_of(request)]
        route = router.route(request, excluded)
        self._router_of[id(route)] = router
        self.loads.change(route.replica, route.prompt_cost + route.output_cost, route.num_tokens, route.num_tokens)
        return route

    def _ingress_of(self, request: RoutedRequest) -> int:
        if self._by_tenant and request.keys:
            return int.from_bytes(request.keys[0].digest[:8], "little") % len(self._routers)
        self._turn = (self._turn + 1) % len(self._routers)
        return self._turn

    def started(self, route: Route) -> None:
        if not route.started and route.replica in self.loads:
            self.loads.change(route.replica, -route.prompt_cost)
        self._router_of[id(route)].started(route)

    def ended(self, route: Route, num_output: int | None = None) -> None:
        if route.replica in self.loads:
            left = route.output_cost + (0 if route.started else route.prompt_cost)
            self.loads.change(route.replica, -left, -route.num_tokens)
        self._router_of.pop(id(route)).ended(route, num_output)

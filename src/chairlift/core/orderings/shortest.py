"""The ordering `shortest`: shortest job first."""

from __future__ import annotations

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("shortest")
class ShortestOrdering(Ordering):
    """Admits the request with the least remaining work: tokens to compute plus `max_new_tokens` still to generate."""

    name = "shortest"

    def claim(self, request: Request) -> float:
        return float(request.num_behind + request.max_new_tokens - request.num_output)

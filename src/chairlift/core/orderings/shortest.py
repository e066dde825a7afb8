"""Shortest job first."""

from __future__ import annotations

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("shortest")
class ShortestOrdering(Ordering):
    """Least remaining work first: tokens still to compute plus the most that may be generated."""

    name = "shortest"

    def claim(self, request: Request) -> float:
        return float(request.num_behind + request.max_new_tokens - request.num_output)

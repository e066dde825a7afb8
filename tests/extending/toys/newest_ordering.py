"""An ordering that serves the newest request first."""

from __future__ import annotations

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("newest")
class NewestOrdering(Ordering):
    """Last come, first served; the lower the claim, the sooner."""

    name = "newest"

    def claim(self, request: Request) -> float:
        return -float(request.order)

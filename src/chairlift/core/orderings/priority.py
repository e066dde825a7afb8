"""The ordering `priority`."""

from __future__ import annotations

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("priority")
class PriorityOrdering(Ordering):
    """Admits requests by `Request.priority`, lowest first."""

    name = "priority"
    uses_priority = True

    def claim(self, request: Request) -> float:
        return float(request.priority)

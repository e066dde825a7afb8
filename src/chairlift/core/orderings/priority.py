"""By the priority that each request carries."""

from __future__ import annotations

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("priority")
class PriorityOrdering(Ordering):
    """By `Request.priority`; the lower, the sooner."""

    name = "priority"
    uses_priority = True

    def claim(self, request: Request) -> float:
        return float(request.priority)

"""The ordering `fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("fcfs")
class FcfsOrdering(Ordering):
    """Admits requests in order of submission."""

    name = "fcfs"
    has_claims = False

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting

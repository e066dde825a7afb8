"""The ordering `boost`: first come, first served, with a head start for short prompts."""

from __future__ import annotations

import math

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request


@ORDERINGS.register("boost")
class BoostOrdering(Ordering):
    """Admits requests by their arrival, less a boost that is the larger the shorter the prompt.

    The claim is a moment: a prompt of half the length counts as if it had come `seconds` · ln 2 earlier. The boost does
    not grow while a request waits, and every other one gets older, so that the long prompts are late by a few
    multiples of `seconds` at most. Shortest first has no such limit, and so the longest total times; first come, first
    served lets everything wait for a few long prompts. Nothing is assumed about the length of the output.
    """

    name = "boost"
    options = frozenset({"boost_seconds"})
    SECONDS = 10.0

    def __init__(self, boost_seconds: float = SECONDS) -> None:
        self.seconds = boost_seconds

    def claim(self, request: Request) -> float:
        return request.arrival + self.seconds * math.log(request.num_prompt)

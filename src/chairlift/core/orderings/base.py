"""What an ordering is: the rule for which request comes first, combinable with every policy.

An ordering gives each request a *claim*, a number: the lower, the sooner. Equal claims are served first come, first
served. *Starved* requests, which were passed over too often, come before all others (see `waiting_queue.py`). The last
request by this order is also the first to be preempted when memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from chairlift.core.choices import make_choice
from chairlift.core.request import Request
from chairlift.registry import Registry

Rank = tuple[bool, float, int]
"""Sorts requests: (not starved, claim, order of submission)."""


class Ordering:
    """Ranks requests by claim. Without further methods, every claim is equal: first come, first served."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # of the config; passed to the constructor as keywords
    has_claims: ClassVar[bool] = True  # False: all claims are equal, and the queue need not be sorted
    takes_slots: ClassVar[bool] = False  # a waiting request may get the slot of a running one (`slot_to_take`)
    depends_on_output: ClassVar[bool] = False  # claims change as running requests generate
    uses_priority: ClassVar[bool] = False  # requests may set `priority`; without this it is refused as meaningless

    def claim(self, request: Request) -> float:
        return 0.0

    def rank(self, request: Request) -> Rank:
        """The total order; no two requests have the same rank."""
        return (not request.starved, 0.0 if request.starved else self.claim(request), request.order)

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Return `waiting`, given in order of submission, in order of admission."""
        return sorted(waiting, key=self.rank)

    def victim(self, running: Sequence[Request]) -> Request:
        """Choose the request to preempt when memory runs out."""
        return max(running, key=self.rank)

    def slot_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Choose a running request whose slot the waiting `request` should get, if any."""
        return None

    def holds_back(self, request: Request) -> bool:
        """Whether a waiting request is not to be admitted at present, to keep slots free for others."""
        return False

    # Called by the scheduler when something happens to a request; most orderings do not need it.

    def arrived(self, request: Request) -> None: ...
    def admitted(self, request: Request) -> None: ...
    def appended(self, request: Request) -> None: ...
    def finished(self, request: Request) -> None: ...


ORDERINGS: Registry[type[Ordering]] = Registry("order", "chairlift.core.orderings")


def make_ordering(name: str, tenant_weights: Mapping[str, float] | None = None) -> Ordering:
    """Build the ordering called `name`."""
    return make_choice(ORDERINGS, name, {"tenant_weights": tenant_weights or None})

"""Who is next, and who gives way. Packing, budgets and allocation are the scheduler's and the same for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from chairlift.core.request import Request


class Policy(Protocol):
    def boarding_order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """The waiting requests in the order in which they should be offered a seat."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """The running request to preempt when memory is short. `running` is in order of submission."""
        ...


class ContinuousPolicy:
    """Iteration-level scheduling, first come first served: the last to arrive gives way to the others.

    The oldest request is never a victim of a younger one, so it always gets on: nobody starves.
    """

    def boarding_order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

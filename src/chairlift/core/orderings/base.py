"""The interface of an ordering, which ranks requests, and those without a state; it can be combined with every policy.

An ordering gives each request a *claim*: lower claims are admitted first, equal claims in order of submission.
*Starved* requests, which were passed over too often, come before all others (see `waiting_queue.py`). The last request
in this order is the first to be preempted when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from chairlift.core.cost_model import WorkForecast
from chairlift.core.request import Request
from chairlift.registry import Registry, make_choice

Rank = tuple[bool, float, int]
"""The sort key of a request: (not starved, claim, order of submission)."""


MAX_OVERTAKES = 16


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an ordering may know before a step is planned."""

    now: float
    running: Sequence[Request]
    waiting: Sequence[Request]
    forecast: WorkForecast | None  # None where the duration of steps is not learned
    chunk: int  # the prompt tokens that the step before could have; 0 before the first step


class Ordering:
    """Ranks requests by claim; by default all claims are equal, which is first come, first served."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # Fields of the config, passed to the constructor as keywords.
    has_claims: ClassVar[bool] = True  # False: all claims are equal, and the queue need not be sorted
    takes_slots: ClassVar[bool] = False  # a waiting request may get the slot of a running one (`slot_to_take`)
    depends_on_output: ClassVar[bool] = False  # claims change as running requests generate
    uses_priority: ClassVar[bool] = False  # whether requests may set `priority`; otherwise setting it is an error
    uses_targets: ClassVar[bool] = False  # the same for `targets`
    own_budget: ClassVar[str | None] = None  # the budget that goes with it, unless the config names one
    max_overtakes: ClassVar[int] = MAX_OVERTAKES  # how often a request may be passed over, unless the config says it

    def claim(self, request: Request) -> float:
        return 0.0

    def rank(self, request: Request) -> Rank:
        """The position of `request` in the total order."""
        return (not request.starved, 0.0 if request.starved else self.claim(request), request.order)

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Sort `waiting`, given in order of submission, by order of admission."""
        return sorted(waiting, key=self.rank)

    def victim(self, running: Sequence[Request]) -> Request:
        """Choose the request to preempt when memory runs out."""
        return max(running, key=self.rank)

    def slot_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Choose a running request to preempt in favour of the waiting `request`, if any."""
        return None

    def holds_back(self, request: Request) -> bool:
        """Whether to defer the admission of a waiting request, to keep slots free for others."""
        return False

    def use_cache(self, tokens_at_hand: Callable[[Request], int]) -> None:
        """Take a function that counts the tokens which a request need not compute; called once, by the scheduler."""

    def use_lengths(self, remaining: Callable[[Request], int | None]) -> None:
        """Take a function that says how many tokens a request is expected to generate yet, if that is known; called
        once, by the scheduler, if lengths are learned."""

    # Notifications from the scheduler, which most orderings do not need.

    def begin_step(self, outlook: Outlook) -> None: ...
    def arrived(self, request: Request) -> None: ...
    def admitted(self, request: Request) -> None: ...
    def appended(self, request: Request) -> None: ...
    def finished(self, request: Request) -> None: ...


ORDERINGS: Registry[type[Ordering]] = Registry("order", "chairlift.core.orderings", grouped=True)


def make_ordering(name: str, tenant_weights: Mapping[str, float] | None = None, **options: object) -> Ordering:
    """Build the ordering called `name`; options that are None are not given."""
    return make_choice(ORDERINGS, name, {"tenant_weights": tenant_weights or None} | options)


@ORDERINGS.register("fcfs")
class FcfsOrdering(Ordering):
    """Admits requests in order of submission."""

    name = "fcfs"
    has_claims = False

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting


@ORDERINGS.register("priority")
class PriorityOrdering(Ordering):
    """Admits requests by `Request.priority`, lowest first. With `priority_takes_slots`, a request that finds no slot or
    memory takes that of a running one with a higher number, the latest of those with the highest."""

    name = "priority"
    options = frozenset({"priority_takes_slots"})
    uses_priority = True

    def __init__(self, priority_takes_slots: bool = False) -> None:
        # A class attribute of all orderings; here the running requests matter for admission only with this option.
        self.takes_slots = self.depends_on_output = priority_takes_slots  # type: ignore[misc]

    def claim(self, request: Request) -> float:
        return float(request.priority)

    def slot_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        if not self.takes_slots:
            return None
        others = [other for other in running if other.priority > request.priority and not other.starved]
        return max(others, key=self.rank, default=None)


@ORDERINGS.register("shortest")
class ShortestOrdering(Ordering):
    """Admits the request with the least remaining work: tokens to compute plus those still to generate, as many as
    `max_new_tokens` allows, or as many as others generated (`learn_lengths`)."""

    name = "shortest"

    def __init__(self) -> None:
        self._remaining: Callable[[Request], int | None] = lambda request: None

    def use_lengths(self, remaining: Callable[[Request], int | None]) -> None:
        self._remaining = remaining

    def claim(self, request: Request) -> float:
        expected = self._remaining(request)
        return float(
            request.num_behind + (request.max_new_tokens - request.num_output if expected is None else expected)
        )

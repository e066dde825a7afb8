"""Who comes first: one small object for each rule, combinable with every policy.

A rule gives each request a *claim*, a number: the lower, the sooner. Among equal claims, first come, first served.
Before all others come the *aged*: requests that were overtaken so often that nobody may overtake them any more (see
`waiting.py`). Whoever comes last by this order is also the first to give way when memory runs out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from chairlift.core.request import Request
from chairlift.errors import InvalidParameter

Rank = tuple[bool, float, int]


class Ordering:
    """First come, first served; the base of the others."""

    name = "fcfs"
    has_claims = False  # whether some requests have better claims than others
    takes_seats = False  # whether someone who waits may be given the seat of someone on board
    minds_decodes = False  # whether who comes first depends on what those on board generate

    def claim(self, request: Request) -> float:
        return 0.0

    def rank(self, request: Request) -> Rank:
        """The whole order: the aged, then by claim, then by submission. No two requests have the same rank."""
        return (not request.aged, 0.0 if request.aged else self.claim(request), request.order)

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """`waiting` (in order of submission) in the order of boarding."""
        return waiting

    def victim(self, running: Sequence[Request]) -> Request:
        """The one who gives way when memory runs out."""
        return max(running, key=self.rank)

    def seat_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Someone on board whose seat belongs to `request` by rights; by most rules nobody's does."""
        return None

    def rests(self, request: Request) -> bool:
        """Whether it is not to board at present, for the sake of others who may come."""
        return False

    # What happens to requests; most rules need not know.

    def arrived(self, request: Request) -> None: ...
    def boarded(self, request: Request) -> None: ...
    def grew(self, request: Request) -> None:
        """Tokens were appended."""

    def finished(self, request: Request) -> None: ...


class PriorityOrdering(Ordering):
    """By `Request.priority`; the lower, the sooner."""

    name = "priority"
    has_claims = True

    def claim(self, request: Request) -> float:
        return float(request.priority)

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return sorted(waiting, key=self.rank)


class ShortestOrdering(Ordering):
    """The least remaining work first: tokens still to compute, and those it may generate at most."""

    name = "shortest"
    has_claims = True

    def claim(self, request: Request) -> float:
        return float(request.num_behind + request.max_new_tokens - request.num_output)

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return sorted(waiting, key=self.rank)


class FairOrdering(Ordering):
    """Tenants share the batch by weight, measured in tokens.

    Every tenant has a counter of the tokens it was served, divided by its weight; the lowest counter is next. The
    prompt is charged when it boards (so that one tenant cannot take every free seat of a step), output as it comes,
    and nothing twice: tokens from the prefix cache and those computed again after a preemption are free. A tenant
    that comes back is lifted to the lowest counter of those who were active, less `BURST`: time away earns some
    credit, so that an occasional request is served as on an idle machine, but never more than that.

    Seats are shared too. Who is next and finds none takes one from the tenant with the most, if that brings the two
    closer together; so a crowd on board does not keep others waiting until one of its long requests ends.
    """

    name = "fair"
    has_claims = True
    takes_seats = True
    minds_decodes = True
    BURST = 2048.0
    CROWD = 8  # open requests, by weight: a tenant with more is a crowd
    GUEST_SECONDS = 30.0  # others who came within this time may come again
    REMEMBERED_TENANTS = 4096

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self._served: dict[str, float] = {}  # by tenant; tokens / weight
        self._open: dict[str, int] = {}  # requests waiting or on board, of the tenants that have any
        self.resting: set[str] = set()  # tenants admitted after all others (`tenant_isolation.py`)
        self._guests: deque[tuple[float, str, int]] = deque(
            maxlen=64
        )  # the last who came, of tenants that are no crowd

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """What a tenant who has open requests was given so far: tokens, divided by its weight."""
        return self._served[tenant]

    def claim(self, request: Request) -> float:
        return self._served[request.tenant]

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Each tenant's own in order of submission. Counters move while others board, so this looks at each turn."""
        queues: dict[str, deque[Request]] = {}
        for request in waiting:
            queues.setdefault(request.tenant, deque()).append(request)
        while queues:
            tenant = min(queues, key=lambda name: self._turn(name, queues[name][0]))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def _turn(self, tenant: str, first: Request) -> tuple[bool, float, int, int]:
        # Of two who were served alike, the one with fewer requests.
        return tenant in self.resting, self._served[tenant], self._open[tenant], first.order

    def rests(self, request: Request) -> bool:
        return request.tenant in self.resting and not request.aged

    def seat_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        seats: dict[str, int] = {}
        for other in running:
            seats[other.tenant] = seats.get(other.tenant, 0) + other.seats
        load = {tenant: count / self.weight(tenant) for tenant, count in seats.items()}
        load_with_it = (seats.get(request.tenant, 0) + request.seats) / self.weight(request.tenant)
        crowds = {name for name, count in seats.items() if count > 1 and load[name] > load_with_it}
        candidates = [other for other in running if other.tenant in crowds and not other.aged]
        return max(candidates, key=lambda other: (load[other.tenant], other.order), default=None)

    def arrived(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._open:
            level = min((self._served[other] for other in self._open), default=self.BURST) - self.BURST
            self._served[tenant] = max(self._served.get(tenant, 0.0), level)
            self._forget_debts_paid(level)
        self._open[tenant] = self._open.get(tenant, 0) + 1
        if not self._is_crowd(tenant):
            self._guests.append((request.arrival, tenant, request.num_prompt))

    def _is_crowd(self, tenant: str) -> bool:
        return self._open.get(tenant, 0) > self.CROWD * self.weight(tenant)

    def crowds(self) -> set[str]:
        return {tenant for tenant in self._open if self._is_crowd(tenant)}

    def shortest_prompt_of_guests(self, now: float) -> int | None:
        """Of those who came lately and are no crowd; None if there are none."""
        prompts = (
            prompt
            for arrival, tenant, prompt in self._guests
            if now - arrival <= self.GUEST_SECONDS and not self._is_crowd(tenant)
        )
        return min(prompts, default=None)

    def boarded(self, request: Request) -> None:
        self._charge(request, request.num_known - max(request.num_computed, request.num_charged))
        request.num_charged = request.num_known

    def grew(self, request: Request) -> None:
        self._charge(request, request.num_known - request.num_charged)
        request.num_charged = request.num_known

    def finished(self, request: Request) -> None:
        self._open[request.tenant] -= 1
        if not self._open[request.tenant]:
            del self._open[request.tenant]
        if not self._open:
            self._served.clear()  # nobody was kept waiting by what was served before: all begin anew

    def _charge(self, request: Request, tokens: int) -> None:
        self._served[request.tenant] += max(0, tokens) / self.weight(request.tenant)

    def _forget_debts_paid(self, level: float) -> None:
        """A tenant that is away and not ahead of the others would be lifted anyway: no need to remember it."""
        if len(self._served) > self.REMEMBERED_TENANTS:
            for tenant in [name for name, served in self._served.items() if served <= max(0.0, level)]:
                if tenant not in self._open:
                    del self._served[tenant]


def parse_weights(given: Mapping[str, float] | Sequence[str] | None) -> dict[str, float]:
    """{"name": 2}, or the same as texts ["name=2"]."""
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif given is None:
        pairs = []
    elif isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
        raise InvalidParameter("tenant_weights", f"must map names to numbers, got {given!r}")
    else:
        pairs = [_parse_weight(text) for text in given]
    weights = dict(pairs)
    if len(weights) < len(pairs):
        raise InvalidParameter("tenant_weights", "name a tenant twice")
    for tenant, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise InvalidParameter("tenant_weights", f"{tenant!r} must have a weight above 0, got {weight!r}")
    return weights


def _parse_weight(text: str) -> tuple[str, float]:
    name, found, number = text.rpartition("=")
    try:
        return name, float(number if found else "")
    except ValueError:
        raise InvalidParameter("tenant_weights", f"must look like name=2, got {text!r}") from None


def make_ordering(name: str, tenant_weights: Mapping[str, float] | None = None) -> Ordering:
    if tenant_weights and name != FairOrdering.name:
        raise InvalidParameter("tenant_weights", f"only go with order {FairOrdering.name!r}, not {name!r}")
    orderings: dict[str, Callable[[], Ordering]] = {
        kind.name: kind for kind in (Ordering, PriorityOrdering, ShortestOrdering)
    }
    orderings[FairOrdering.name] = lambda: FairOrdering(tenant_weights)
    if name not in orderings:
        raise InvalidParameter("order", f"unknown order {name!r}; choose from {', '.join(orderings)}")
    return orderings[name]()

"""The ordering `fair`: tenants share the batch by weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter


@ORDERINGS.register("fair")
class FairOrdering(Ordering):
    """Tenants share the batch by weight, measured in tokens.

    Every tenant has a counter of the tokens it was served, divided by its weight; the tenant with the lowest counter is
    next. Prompts are charged on admission (so that one tenant cannot take every free slot of a step), output tokens as
    they are generated, and no token twice: tokens from the prefix cache and recomputed tokens are free. The counter of
    a tenant that returns is raised to the lowest one of the active tenants, less `BURST`: an idle tenant earns a
    limited credit, so that an occasional request is served as on an idle machine.

    Slots are shared too. If no slot is free, the next request takes one from the tenant with the most, provided that
    this makes the two more equal; so a tenant with many long requests does not block the others until one ends.
    """

    name = "fair"
    options = frozenset({"tenant_weights"})
    takes_slots = True
    depends_on_output = True
    BURST = 2048.0
    HEAVY_REQUESTS = 8  # a tenant with more open requests, times its weight, is heavy
    LIGHT_SECONDS = 30.0  # a light tenant counts for this long after its last request
    REMEMBERED_TENANTS = 4096

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(tenant_weights or {})
        self._served: dict[str, float] = {}  # The keys are tenants, the values tokens / weight.
        self._open: dict[str, int] = {}  # waiting and running requests, of the tenants that have any
        self.held_back: set[str] = set()  # tenants whose admission is deferred (`tenant_isolation.py`)
        self._light_arrivals: deque[tuple[float, str, int]] = deque(maxlen=64)  # (arrival, tenant, prompt tokens)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """Tokens served to a tenant with open requests, divided by its weight."""
        return self._served[tenant]

    def claim(self, request: Request) -> float:
        return self._served[request.tenant]

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Yield the requests of each tenant in order of submission. The next tenant is chosen lazily, because counters
        change with each admission."""
        queues: dict[str, deque[Request]] = {}
        for request in waiting:
            queues.setdefault(request.tenant, deque()).append(request)
        while queues:
            tenant = min(queues, key=lambda name: self._tenant_rank(name, queues[name][0]))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def _tenant_rank(self, tenant: str, first: Request) -> tuple[bool, float, int, int]:
        # Ties are broken in favour of the tenant with fewer open requests.
        return tenant in self.held_back, self._served[tenant], self._open[tenant], first.order

    def holds_back(self, request: Request) -> bool:
        return request.tenant in self.held_back and not request.starved

    def slot_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        slots: dict[str, int] = {}
        for other in running:
            slots[other.tenant] = slots.get(other.tenant, 0) + other.num_slots
        load = {tenant: count / self.weight(tenant) for tenant, count in slots.items()}
        load_after = (slots.get(request.tenant, 0) + request.num_slots) / self.weight(request.tenant)
        larger = {name for name, count in slots.items() if count > 1 and load[name] > load_after}
        candidates = [other for other in running if other.tenant in larger and not other.starved]
        return max(candidates, key=lambda other: (load[other.tenant], other.order), default=None)

    def arrived(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._open:
            level = min((self._served[other] for other in self._open), default=self.BURST) - self.BURST
            self._served[tenant] = max(self._served.get(tenant, 0.0), level)
            self._drop_idle_counters(level)
        self._open[tenant] = self._open.get(tenant, 0) + 1
        if not self._is_heavy(tenant):
            self._light_arrivals.append((request.arrival, tenant, request.num_prompt))

    def _is_heavy(self, tenant: str) -> bool:
        return self._open.get(tenant, 0) > self.HEAVY_REQUESTS * self.weight(tenant)

    def heavy_tenants(self) -> set[str]:
        """Tenants with many open requests, from which others are isolated."""
        return {tenant for tenant in self._open if self._is_heavy(tenant)}

    def usual_light_prompt(self, now: float) -> int | None:
        """The median length of the prompts that light tenants sent recently; None if there are none."""
        prompts = [
            prompt
            for arrival, tenant, prompt in self._light_arrivals
            if now - arrival <= self.LIGHT_SECONDS and not self._is_heavy(tenant)
        ]
        return median_low(prompts) if prompts else None

    def admitted(self, request: Request) -> None:
        self._charge(request, request.num_known - max(request.num_computed, request.num_charged))
        request.num_charged = request.num_known

    def appended(self, request: Request) -> None:
        self._charge(request, request.num_known - request.num_charged)
        request.num_charged = request.num_known

    def finished(self, request: Request) -> None:
        self._open[request.tenant] -= 1
        if not self._open[request.tenant]:
            del self._open[request.tenant]
        if not self._open:
            self._served.clear()  # All tenants start from zero again once no request is open.

    def _charge(self, request: Request, tokens: int) -> None:
        self._served[request.tenant] += max(0, tokens) / self.weight(request.tenant)

    def _drop_idle_counters(self, level: float) -> None:
        """Drop the counters of inactive tenants that would be raised to `level` anyway."""
        if len(self._served) > self.REMEMBERED_TENANTS:
            for tenant in [name for name, served in self._served.items() if served <= max(0.0, level)]:
                if tenant not in self._open:
                    del self._served[tenant]


def parse_weights(declared: Mapping[str, float] | Sequence[str] | None) -> dict[str, float]:
    """Parse {"name": 2} or ["name=2"]."""
    if isinstance(declared, Mapping):
        pairs = list(declared.items())
    elif declared is None:
        pairs = []
    elif (
        isinstance(declared, str)
        or not isinstance(declared, Sequence)
        or not all(isinstance(text, str) for text in declared)
    ):
        raise InvalidParameter("tenant_weights", f"must map names to numbers, got {declared!r}")
    else:
        pairs = [_parse_weight(text) for text in declared]
    weights = dict(pairs)
    if len(weights) < len(pairs):
        raise InvalidParameter("tenant_weights", "contains a tenant twice")
    for tenant, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise InvalidParameter("tenant_weights", f"{tenant!r} must have a weight above 0, got {weight!r}")
    return weights


def _parse_weight(text: str) -> tuple[str, float]:
    name, separator, number = text.rpartition("=")
    try:
        return name, float(number if separator else "")
    except ValueError:
        raise InvalidParameter("tenant_weights", f"must look like name=2, got {text!r}") from None

"""Orderings that ask the prefix cache: `cached`, and `fair-cached`, which stays fair between tenants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from chairlift.core.orderings.base import ORDERINGS, Ordering
from chairlift.core.orderings.fair import FairOrdering
from chairlift.core.request import Request

TokensAtHand = Callable[[Request], int]
MAX_COMPARED = 128  # waiting requests that are looked up in the cache in each step; the others keep their order


@ORDERINGS.register("cached")
class CachedOrdering(Ordering):
    """Admits the request that has the most tokens at hand: in the prefix cache, in host memory, or computed already.

    Requests with a common prefix so follow each other while it is cached. The first to be preempted is the one with the
    fewest computed tokens.
    """

    name = "cached"
    depends_on_output = True

    def __init__(self) -> None:
        self._at_hand: TokensAtHand = lambda request: request.num_computed

    def use_cache(self, tokens_at_hand: TokensAtHand) -> None:
        self._at_hand = tokens_at_hand

    def claim(self, request: Request) -> float:
        return -float(self._at_hand(request))

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return [*sorted(waiting[:MAX_COMPARED], key=self.rank), *waiting[MAX_COMPARED:]]


@ORDERINGS.register("fair-cached")
class FairCachedOrdering(FairOrdering):
    """Like `fair`, but among the tenants that are at most `BURST` tokens ahead of the last one, the request with the
    longest cached prefix comes first.

    A tenant's requests so follow each other while its prefix is in the cache, until it has used up its share of a
    round. `fair` alternates between tenants, and each evicts the prefixes of the others. The counters of two tenants
    that always wait differ by no more than with `fair`, where a tenant that returns may be `BURST` behind.
    """

    name = "fair-cached"

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        super().__init__(tenant_weights)
        self._at_hand: TokensAtHand = lambda request: request.num_computed

    def use_cache(self, tokens_at_hand: TokensAtHand) -> None:
        self._at_hand = tokens_at_hand

    def arrange(self, waiting: Sequence[Request]) -> Iterable[Request]:
        queues: dict[str, deque[tuple[int, Request]]] = {}
        for request in waiting:
            queues.setdefault(request.tenant, deque()).append((0, request))
        most = max(1, MAX_COMPARED // max(1, len(queues)))
        for tenant, queue in queues.items():
            compared = [(self._at_hand(request), request) for _, request in list(queue)[:most]]
            compared.sort(key=lambda entry: (-entry[0], entry[1].order))
            queues[tenant] = deque([*compared, *list(queue)[most:]])
        while queues:
            level = min(self._served[tenant] for tenant in queues) + self.BURST
            tenant = min(queues, key=lambda name: self._round_rank(name, *queues[name][0], level=level))
            yield queues[tenant].popleft()[1]
            if not queues[tenant]:
                del queues[tenant]

    def _round_rank(self, tenant: str, at_hand: int, first: Request, *, level: float) -> tuple[float, ...]:
        held_back, *others = self._tenant_rank(tenant, first)
        return held_back, self._served[tenant] > level, -at_hand, *others

    def slot_to_take(self, request: Request, running: Sequence[Request]) -> Request | None:
        """As in `fair`, but only from a tenant that has used up its share of the round."""
        victim = super().slot_to_take(request, running)
        ahead = self._served[request.tenant] + self.BURST
        return victim if victim is not None and self._served[victim.tenant] > ahead else None

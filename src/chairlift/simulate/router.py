"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.simulate.replica import Replica

AFFINE_TOKENS = 256  # requests that begin with so many equal tokens belong together
TOO_BUSY = 1.5  # a replica with so many times the mean load is passed over


class Router(Protocol):
    def choose(self, request: Request, replicas: Sequence[Replica]) -> int: ...


class RoundRobin:
    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoaded:
    """The one with the fewest tokens still to compute."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        loads = [replica.load for replica in replicas]
        return loads.index(min(loads))


class PrefixAffine:
    """The one that has seen a prompt with the same beginning, unless it has far more to do than the others."""

    def __init__(self) -> None:
        self._home: dict[tuple[int, ...], int] = {}
        self._fallback = LeastLoaded()

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        key = tuple(request.tokens[:AFFINE_TOKENS])
        home = self._home.get(key)
        mean = sum(replica.load for replica in replicas) / len(replicas)
        own = request.num_prompt + request.max_new_tokens
        if home is None or replicas[home].load > TOO_BUSY * mean + own:
            home = self._home[key] = self._fallback.choose(request, replicas)
        return home


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affine": PrefixAffine,
}


def make_router(name: str) -> Router:
    if name not in ROUTERS:
        raise InvalidParameter("router", f"unknown router {name!r}; choose from {', '.join(ROUTERS)}")
    return ROUTERS[name]()

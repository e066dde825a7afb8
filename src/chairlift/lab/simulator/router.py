"""Routers: choose the replica of a request."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

from chairlift.errors import InvalidParameter
from chairlift.lab.simulator.records import Arrival

AFFINE_TOKENS = 256  # requests that share this many first tokens have the same key
TOO_BUSY = 1.5  # a replica with this many times the mean load is skipped


class ReplicaLoads:
    """The tokens of the open requests of each replica, with a heap to find the least."""

    def __init__(self, num_replicas: int) -> None:
        self.total = 0
        self._loads = [0] * num_replicas
        self._heap = [(0, index) for index in range(num_replicas)]  # entries may be out of date

    def __len__(self) -> int:
        return len(self._loads)

    def __getitem__(self, index: int) -> int:
        return self._loads[index]

    def change(self, index: int, tokens: int) -> None:
        self.total += tokens
        self._loads[index] += tokens
        heappush(self._heap, (self._loads[index], index))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(load, index) for index, load in enumerate(self._loads)]
            heapify(self._heap)

    def least(self) -> int:
        """The replica with the least load, the first of them if there are several."""
        heap = self._heap
        while self._loads[heap[0][1]] != heap[0][0]:
            heappop(heap)
        return heap[0][1]


class Router(Protocol):
    def choose(self, arrival: Arrival, loads: ReplicaLoads) -> int: ...


class RoundRobin:
    def __init__(self) -> None:
        self._next = -1

    def choose(self, arrival: Arrival, loads: ReplicaLoads) -> int:
        self._next = (self._next + 1) % len(loads)
        return self._next


class LeastLoaded:
    """Chooses the replica with the fewest tokens still to compute."""

    def choose(self, arrival: Arrival, loads: ReplicaLoads) -> int:
        return loads.least()


class PrefixAffine:
    """Chooses the replica that had a prompt with the same prefix, unless its load is far above the mean."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}  # by the hash of the prefix, to save memory

    def choose(self, arrival: Arrival, loads: ReplicaLoads) -> int:
        key = hash(tuple(arrival.prompt[:AFFINE_TOKENS]))
        home = self._home.get(key)
        own = len(arrival.prompt) + arrival.n_out
        if home is None or loads[home] > TOO_BUSY * loads.total / len(loads) + own:
            home = self._home[key] = loads.least()
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

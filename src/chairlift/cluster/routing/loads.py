"""What each replica still has to compute, and how much of its memory is free."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from zlib import crc32

ReplicaId = int | str
Rank = tuple[int, int, int, ReplicaId]
"""Sort key of replicas: (tokens still to compute, tokens ever sent, place among equals, id)."""


@dataclass(slots=True)
class _Replica:
    num_tokens: int  # room of its KV cache
    place: int  # among equals
    pending: int = 0  # tokens still to compute, of requests sent from here
    held: int = 0  # tokens of open requests sent from here
    others_pending: int = 0  # of requests that other routers sent, by the replica's last report
    others_held: int = 0
    sent: int = 0  # tokens of all requests so far


class ReplicaLoads:
    """The loads of all replicas, with a heap to find the least loaded one."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` shuffles replicas with equal loads, so that several routers do not all choose the same one; without it
        the order is that of their ids."""
        self._seed = seed
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._heap: list[Rank] = []  # entries may be out of date

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._replicas)

    def __contains__(self, replica: object) -> bool:
        return replica in self._replicas

    def __getitem__(self, replica: ReplicaId) -> int:
        """Tokens that `replica` still has to compute."""
        found = self._replicas[replica]
        return found.pending + found.others_pending

    def free_tokens(self, replica: ReplicaId) -> int:
        """Room in its KV cache beside open requests; cached prefixes of ended ones count as free."""
        return max(0, self._replicas[replica].num_tokens - self.held_tokens(replica))

    def held_tokens(self, replica: ReplicaId) -> int:
        """Tokens of open requests in its KV cache."""
        found = self._replicas[replica]
        return found.held + found.others_held

    def used_share(self) -> float:
        """Share of the KV caches of all replicas that open requests hold."""
        room = sum(replica.num_tokens for replica in self._replicas.values())
        held = sum(map(self.held_tokens, self._replicas))
        return min(1.0, held / room) if room else 0.0

    def rank(self, replica: ReplicaId) -> Rank:
        found = self._replicas[replica]
        return (found.pending + found.others_pending, found.sent, found.place, replica)

    def add(self, replica: ReplicaId, num_tokens: int) -> None:
        place = 0 if self._seed is None else crc32(f"{self._seed} {replica}".encode())
        self._replicas[replica] = _Replica(num_tokens, place)
        heappush(self._heap, self.rank(replica))

    def remove(self, replica: ReplicaId) -> None:
        del self._replicas[replica]

    def change(self, replica: ReplicaId, pending: int, held: int = 0, sent: int = 0) -> None:
        """Add to the counts of `replica`."""
        found = self._replicas[replica]
        found.pending += pending
        found.held += held
        found.sent += sent
        self._changed(replica)

    def report(self, replica: ReplicaId, pending: int, held: int) -> None:
        """Take the replica's own counts; what exceeds ours belongs to requests that others sent."""
        found = self._replicas[replica]
        found.others_pending = max(0, pending - found.pending)
        found.others_held = max(0, held - found.held)
        self._changed(replica)

    def _changed(self, replica: ReplicaId) -> None:
        heappush(self._heap, self.rank(replica))
        if len(self._heap) > 64 + 4 * len(self._replicas):
            self._heap = [self.rank(each) for each in self._replicas]
            heapify(self._heap)

    def least(self, excluded: Container[ReplicaId] = ()) -> ReplicaId:
        """The replica with the least to compute; of several, the one that was sent the least so far. At least one is
        not in `excluded`."""
        heap, skipped = self._heap, []
        while True:
            first = heap[0]
            if first[-1] not in self._replicas or self.rank(first[-1]) != first:
                heappop(heap)
            elif first[-1] in excluded:
                skipped.append(heappop(heap))
            else:
                break
        for rank in skipped:
            heappush(heap, rank)
        return first[-1]

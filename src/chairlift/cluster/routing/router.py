"""The router: chooses a replica by a policy, and keeps account of what every replica still has to compute.

It knows the loads of replicas, and which prompts are in their caches.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from chairlift.cluster.routing.policies import ROUTERS


class RoutedRequest(NamedTuple):
    num_prompt: int
    max_output: int | None = None  # the request's own limit, if it has one
    keys: tuple[PrefixKey, ...] = ()  # The prompt's prefixes, shortest first, if the policy reads them.


ReplicaId = int | str
Rank = tuple[int, int, ReplicaId]
"""Sort key of replicas: (tokens still to compute, tokens ever sent, id)."""

MAX_DRAWS = 16  # It can take several to find two replicas that are not excluded.


@dataclass(slots=True)
class _Replica:
    num_tokens: int  # room of its KV cache
    pending: int = 0  # tokens still to compute, of requests sent from here
    held: int = 0  # tokens of open requests sent from here
    open: int = 0  # the number of these requests
    others_pending: int = 0  # Requests that other routers sent, as the replica last reported.
    others_held: int = 0
    sent: int = 0  # tokens of all requests so far


class ReplicaLoads:
    """The loads of all replicas, with a heap to find the least loaded one.

    Where several routers share the replicas, each has a source of random numbers (`draw`). They learn of each other's
    requests with a delay, and would all send theirs to the replica that was idle at the last report. `least` is then
    the less loaded of two replicas at random.
    """

    def __init__(self) -> None:
        self.draw: random.Random | None = None
        self._ids: list[ReplicaId] = []
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

    def num_open(self, replica: ReplicaId) -> int:
        """Its open requests; those that others sent are estimated to be as long as those sent from here."""
        found = self._replicas[replica]
        others = found.others_held * found.open // found.held if found.held else min(1, found.others_held)
        return found.open + others

    def used_share(self) -> float:
        """Share of the KV caches of all replicas that open requests hold."""
        room = sum(replica.num_tokens for replica in self._replicas.values())
        held = sum(map(self.held_tokens, self._replicas))
        return min(1.0, held / room) if room else 0.0

    def rank(self, replica: ReplicaId) -> Rank:
        found = self._replicas[replica]
        return (found.pending + found.others_pending, found.sent, replica)

    def add(self, replica: ReplicaId, num_tokens: int) -> None:
        self._replicas[replica] = _Replica(num_tokens)
        self._ids.append(replica)
        heappush(self._heap, self.rank(replica))

    def remove(self, replica: ReplicaId) -> None:
        del self._replicas[replica]
        self._ids.remove(replica)

    def change(self, replica: ReplicaId, pending: int, held: int = 0, sent: int = 0) -> None:
        """Add to the counts of `replica`; a change of `held` is the begin or the end of a request."""
        found = self._replicas[replica]
        found.pending += pending
        found.held += held
        found.open += (held > 0) - (held < 0)
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
        found = self._two(excluded)
        return min(found, key=self.rank) if found else self._least_of_all(excluded)

    def _two(self, excluded: Container[ReplicaId]) -> set[ReplicaId]:
        """Two replicas at random; none if all are to be compared, or too many are excluded."""
        found: set[ReplicaId] = set()
        if self.draw is not None and len(self._ids) > 2:
            for _ in range(MAX_DRAWS):
                replica = self.draw.choice(self._ids)
                if replica not in excluded:
                    found.add(replica)
                if len(found) == 2:
                    return found
        return set()

    def _least_of_all(self, excluded: Container[ReplicaId]) -> ReplicaId:
        heap, skipped = self._heap, []
        while True:
            first = heap[0]
            if first[2] not in self._replicas or self.rank(first[2]) != first:
                heappop(heap)
            elif first[2] in excluded:
                skipped.append(heappop(heap))
            else:
                break
        for rank in skipped:
            heappush(heap, rank)
        return first[2]


SHORTEST_PREFIX = 64
GROWTH = 1.25
BLOCK_SIZE = 16


class PrefixKey(NamedTuple):
    num_tokens: int
    digest: bytes


def prefix_lengths(num_tokens: int) -> Iterator[int]:
    """Lengths of the prefixes of a prompt that get a key, in rising order."""
    length = SHORTEST_PREFIX
    while length <= num_tokens:
        yield length
        length = max(length + SHORTEST_PREFIX, int(length * GROWTH) // BLOCK_SIZE * BLOCK_SIZE)


def prefix_keys(tokens: Sequence[int], *, adapter: str = "", salt: str = "") -> tuple[PrefixKey, ...]:
    """The keys of a prompt, of its token ids or of a view of its text as numbers of the same size. Requests with
    different adapters or cache salts share no KV blocks and no keys."""
    state = hashlib.blake2b(f"{len(adapter)} {adapter}{salt}".encode(), digest_size=16)
    keys: list[PrefixKey] = []
    begin = 0
    for end in prefix_lengths(len(tokens)):
        part = tokens[begin:end]
        state.update(part if isinstance(part, memoryview) else array("I", part))  # A text is not copied.
        keys.append(PrefixKey(end, state.digest()))
        begin = end
    return tuple(keys)


class PrefixMap:
    """Follows the prefix cache of each replica: prompts sent there enter it, the least recently used leave it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[ReplicaId, None]] = {}
        self._used: dict[ReplicaId, OrderedDict[bytes, int]] = {}  # digest -> its tokens; least recently used first
        self._room: dict[ReplicaId, int] = {}  # tokens

    def __len__(self) -> int:
        return sum(map(len, self._used.values()))

    def add(self, replica: ReplicaId, num_tokens: int) -> None:
        """Follow a replica whose KV cache has room for `num_tokens`."""
        self._used[replica] = OrderedDict()
        self._room[replica] = num_tokens

    def remove(self, replica: ReplicaId) -> None:
        for digest in self._used.pop(replica):
            self._release(digest, replica)
        del self._room[replica]

    def holders(self, keys: tuple[PrefixKey, ...]) -> Iterator[tuple[ReplicaId, int]]:
        """The replicas that hold a prefix, with its length; longest first, and each replica once."""
        seen: set[ReplicaId] = set()
        for key in reversed(keys):
            for replica in self._holders.get(key.digest, ()):
                if replica not in seen:
                    seen.add(replica)
                    yield replica, key.num_tokens

    def num_held(self, replica: ReplicaId, keys: tuple[PrefixKey, ...]) -> int:
        used = self._used[replica]
        return next((key.num_tokens for key in reversed(keys) if key.digest in used), 0)

    def record(self, replica: ReplicaId, keys: tuple[PrefixKey, ...], num_tokens: int) -> None:
        """A prompt with these keys was sent to `replica`; with its output it will have `num_tokens`."""
        used = self._used[replica]
        # Longest first: its head is then the most recently used part of a prompt, as in a replica's own cache.
        end = num_tokens
        for index in range(len(keys) - 1, -1, -1):
            begin = keys[index - 1].num_tokens if index else 0
            digest = keys[index].digest
            if digest in used:
                used.move_to_end(digest)
            else:
                used[digest] = end - begin
                self._room[replica] -= end - begin
                self._holders.setdefault(digest, {})[replica] = None
            end = begin
        while self._room[replica] < 0 and used:
            digest, freed = used.popitem(last=False)
            self._room[replica] += freed
            self._release(digest, replica)

    def _release(self, digest: bytes, replica: ReplicaId) -> None:
        holders = self._holders[digest]
        del holders[replica]
        if not holders:
            del self._holders[digest]


# What a generated token costs beside a prompt token. By a roofline of an 8B model on an H200 at 64 requests it is 70 µs
# to 20 µs, by the profile of two CPU cores at 8 requests 1.5 ms to 0.3 ms.
OUTPUT_COST = 4
FIRST_ESTIMATE = 128  # tokens of an output, before any has ended
MEMORY = 0.98  # weight of the past in the mean output length: about the last 50 requests


@dataclass(slots=True)
class Route:
    """A request that was sent to a replica."""

    replica: ReplicaId
    prompt_cost: int  # tokens of the prompt that the replica must compute
    output_cost: int
    num_tokens: int  # The tokens that it will hold at its end.
    started: bool = False
    ended: bool = False


class Router:
    def __init__(self, policy: str) -> None:
        self.policy = ROUTERS.get(policy)()
        self.loads = ReplicaLoads()
        self._mean_output = float(FIRST_ESTIMATE)

    def add(self, replica: ReplicaId, num_tokens: int) -> None:
        """Send requests to `replica` from now on; its KV cache has room for `num_tokens`."""
        self.loads.add(replica, num_tokens)
        self.policy.added(replica, num_tokens)

    def remove(self, replica: ReplicaId) -> None:
        self.loads.remove(replica)
        self.policy.removed(replica)

    def route(self, request: RoutedRequest, excluded: Container[ReplicaId] = ()) -> Route:
        """Choose the replica of `request`; one must be left beside those `excluded`."""
        replica = self.policy.choose(request, self.loads, excluded)
        output = self._expected_output(request)
        prompt = request.num_prompt - self.policy.num_held(replica, request.keys)
        self.policy.routed(request, replica, output)
        route = Route(replica, prompt, OUTPUT_COST * output, request.num_prompt + output)
        self.loads.change(replica, prompt + route.output_cost, route.num_tokens, route.num_tokens)
        return route

    def started(self, route: Route) -> None:
        """The first token of a request arrived: its prompt is computed."""
        if not route.started and not route.ended and route.replica in self.loads:
            self.loads.change(route.replica, -route.prompt_cost)
        route.started = True

    def ended(self, route: Route, num_output: int | None = None) -> None:
        """A request ended; `num_output` are its tokens, if it ended well."""
        if num_output is not None:
            self._mean_output = MEMORY * self._mean_output + (1 - MEMORY) * num_output
        if not route.ended and route.replica in self.loads:
            left = route.output_cost + (0 if route.started else route.prompt_cost)
            self.loads.change(route.replica, -left, -route.num_tokens)
        route.ended = True

    def _expected_output(self, request: RoutedRequest) -> int:
        mean = round(self._mean_output)
        return mean if request.max_output is None else min(mean, request.max_output)

"""Which replica probably holds which prefixes, in memory bounded by the replicas' own caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from chairlift.cluster.routing.loads import ReplicaId
from chairlift.cluster.routing.prefix_keys import PrefixKey


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

"""Tiers behind the prefix cache: larger and slower memory that keeps what the device has no room for.

    device   -- save, once a block is full -->   host memory and disk
             <-- load, if computing takes longer --

A tier holds *parts* of blocks under the digests of the prefix index: keys and values, or the state of recurrent layers
at the end of the block. A part that is lost, damaged or slow is a miss, never an error.

This module decides and counts; a `TierMover` moves the bytes, in threads of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.core.evictions.base import Eviction, LRUEviction

KEYS_AND_VALUES, STATE = "kv", "state"  # the parts of a block
REMEMBERED_EVICTIONS = 65_536
FIRST_SPEED = 1e9  # bytes per second, believed until a load is measured
_SPEED_GAIN = 0.3  # the share of the last measurement
_HOPE = 1.02  # Each load that is not made raises the believed speed, so that a tier that was slow is tried again.


class PartKey(NamedTuple):
    """What a tier finds a part by."""

    digest: bytes
    part: str


class PartMove(NamedTuple):
    """A part and its place on the device: a block, or a state slot."""

    key: PartKey
    place: int


class StoredPart(NamedTuple):
    """A part that a tier has from an earlier run."""

    key: PartKey
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A tier does not have a part any more: it could not be written, or was damaged."""

    tier: str
    key: PartKey


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended. `failed` parts were not found intact; `seconds` are those spent on the bytes of each tier."""

    load_id: int
    failed: frozenset[PartKey] = frozenset()
    seconds: Mapping[str, float] | None = None


class TierMover(ABC):
    """Moves parts between the device and the stores of the tiers. Only `save` may take time of the caller's."""

    @abstractmethod
    def save(self, tier_moves: Sequence[tuple[Sequence[str], PartMove]]) -> None:
        """Copy parts from the device, each to the tiers named with it. Steps that are launched later may overwrite
        their places."""

    @abstractmethod
    def load(self, load_id: int, moves: Sequence[tuple[str, PartMove]]) -> None:
        """Start to copy parts from the tiers named with them to the device; a `LoadEnded` report follows."""

    @abstractmethod
    def drop(self, tier: str, keys: Sequence[PartKey]) -> None:
        """Remove parts from the store of a tier."""

    @abstractmethod
    def reports(self) -> Sequence[Lost | LoadEnded]:
        """What has happened since the last call, in order."""

    def wait(self, seconds: float) -> None:  # noqa: B027 (a simulation does not wait)
        """Wait for a report, at most for so long."""

    def close(self) -> None:  # noqa: B027 (most stores need no end)
        """Write what is to be written and stop the threads."""


class Tier:
    """What one tier holds, in the order of eviction, and how fast it is loaded from."""

    def __init__(
        self,
        name: str,
        num_bytes: int,
        contents: Iterable[StoredPart] = (),
        *,
        overhead: int = 0,
        eviction: Eviction[PartKey] | None = None,
    ) -> None:
        """`contents`: from an earlier run, oldest first, with the `overhead` of bytes that each part takes beside its
        own."""
        self.name = name
        self.num_bytes = num_bytes
        self._overhead = overhead
        self.num_used = 0
        self.num_evictions = 0
        self._order = LRUEviction[PartKey]() if eviction is None else eviction
        self._sizes: dict[PartKey, int] = {}
        self._speed = FIRST_SPEED
        for part in contents:
            self._add(part.key, part.num_bytes)
        # Those that do not fit: the tier was larger in the earlier run.
        self.surplus: list[PartKey] = []
        while self.num_used > num_bytes:
            self.surplus.append(self._give_up_one())

    def __len__(self) -> int:
        return len(self._sizes)

    def contains(self, key: PartKey) -> bool:
        return key in self._sizes

    def get(self, key: PartKey) -> None:
        """Note that a part was used."""
        if key in self._sizes:
            self._order.remove(key)
            self._order.append(key)

    def put(self, key: PartKey, num_bytes: int) -> list[PartKey]:
        """Add a part that is not contained; return those that are evicted for it. One that is too large for the whole
        tier is not added."""
        num_bytes += self._overhead
        if num_bytes > self.num_bytes:
            return []
        evicted = []
        while self.num_used + num_bytes > self.num_bytes:
            evicted.append(self._give_up_one())
        self._add(key, num_bytes)
        return evicted

    def evict(self, key: PartKey) -> bool:
        """Remove a part; return False if it is not contained."""
        if key not in self._sizes:
            return False
        self._order.remove(key)
        self.num_used -= self._sizes.pop(key)
        return True

    def _give_up_one(self) -> PartKey:
        key = self._order.evict(1)[0]
        self.num_used -= self._sizes.pop(key)
        self.num_evictions += 1
        return key

    def _add(self, key: PartKey, num_bytes: int) -> None:
        self._sizes[key] = num_bytes
        self.num_used += num_bytes
        self._order.append(key)

    def seconds(self, num_bytes: int) -> float:
        """About how long loading so many bytes takes."""
        return num_bytes / self._speed

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Learn from a measured load."""
        if num_bytes and seconds > 0:
            self._speed += _SPEED_GAIN * (num_bytes / seconds - self._speed)

    def hope(self) -> None:
        """Believe in a higher speed, after a load was not made because computing seemed faster."""
        self._speed *= _HOPE


class PastEviction(NamedTuple):
    """When a part left a tier, and which one."""

    tier: str
    time: float


class TierUsage(NamedTuple):
    """What a tier holds, and what it did since the start."""

    name: str
    used_bytes: int
    total_bytes: int
    loaded_bytes: int
    saved_bytes: int
    evictions: int
    lost: int  # parts that could not be written, or were damaged


class Tiers:
    """All tiers behind one device, fastest first."""

    def __init__(self, tiers: Sequence[Tier], mover: TierMover, part_bytes: Mapping[str, int]) -> None:
        assert tiers
        self.tiers = tiers
        self.mover = mover
        self.part_bytes = part_bytes
        self.now = 0.0
        self.loaded_bytes: Counter[str] = Counter()  # The keys are tiers, as in the next ones.
        self.saved_bytes: Counter[str] = Counter()
        self.num_lost: Counter[str] = Counter()
        self._by_name = {tier.name: tier for tier in tiers}
        self._pending: list[PartMove] = []
        self._dropped: dict[str, list[PartKey]] = {tier.name: [] for tier in tiers}
        self._evicted: OrderedDict[PartKey, PastEviction] = OrderedDict()
        for tier in tiers:
            mover.drop(tier.name, tier.surplus)

    @property
    def usage(self) -> list[TierUsage]:
        return [
            TierUsage(
                tier.name,
                tier.num_used,
                tier.num_bytes,
                self.loaded_bytes[tier.name],
                self.saved_bytes[tier.name],
                tier.num_evictions,
                self.num_lost[tier.name],
            )
            for tier in self.tiers
        ]

    def find(self, key: PartKey) -> Tier | None:
        """The fastest tier that has a part."""
        return next((tier for tier in self.tiers if tier.contains(key)), None)

    def eviction(self, key: PartKey) -> PastEviction | None:
        """When a part last left a tier, if that is remembered."""
        return self._evicted.get(key)

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that requests use the keys and values of blocks, wherever they are."""
        for digest in digests:
            for tier in self.tiers:
                tier.get(PartKey(digest, KEYS_AND_VALUES))

    def keep(self, key: PartKey, place: int) -> None:
        """Keep a part that has just been computed in every tier that lacks it; copied with the next `flush`."""
        lacking = [tier for tier in self.tiers if not tier.contains(key)]
        for tier in lacking:
            evicted = tier.put(key, self.part_bytes[key.part])
            self._dropped[tier.name] += evicted
            for other in evicted:
                self._remember(other, tier.name)
        if lacking:
            self._evicted.pop(key, None)
            self._pending.append(PartMove(key, place))

    def flush(self) -> None:
        """Let the mover copy what is to be kept. Call it before another step is planned."""
        if not self._pending:
            return
        for name, keys in self._dropped.items():
            if keys:
                self.mover.drop(name, keys)
                self._dropped[name] = []
        moves = []
        for move in self._pending:
            names = tuple(tier.name for tier in self.tiers if tier.contains(move.key))
            for name in names:
                self.saved_bytes[name] += self.part_bytes[move.key.part]
            if names:
                moves.append((names, move))
        self._pending = []
        self.mover.save(moves)

    def read_reports(self) -> list[LoadEnded]:
        """Forget what the mover has lost; return the loads that have ended."""
        ended = []
        for report in self.mover.reports():
            if isinstance(report, LoadEnded):
                ended.append(report)
            elif self._by_name[report.tier].evict(report.key):
                self.num_lost[report.tier] += 1
                self.mover.drop(report.tier, [report.key])  # It may have been saved again since.
        return ended

    def learn(self, loaded: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Count the bytes loaded from each tier, and learn its speed."""
        for name, num_bytes in loaded.items():
            self.loaded_bytes[name] += num_bytes
            self._by_name[name].learn(num_bytes, seconds.get(name, 0.0))

    def _remember(self, key: PartKey, tier: str) -> None:
        self._evicted[key] = PastEviction(tier, self.now)
        self._evicted.move_to_end(key)
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

"""How many replicas a fleet needs, from what its requests wait for; the simulator and the cluster run the same code.

    pressure = max(time to first token / target,  share of KV blocks in use / target,  time per token / target)

At pressure 1 the fleet has the right size; above it, it grows in proportion, at most to its double at once. A new
replica helps only after its cold start, so the share of blocks in use is extrapolated by as long: it rises steadily
with the load, while waiting begins when it is too late. The fleet shrinks to the largest size that any moment of the
last `down_delay` seconds asked for, and by a fifth at most in that time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.errors import InvalidParameter

SLACK = 0.8  # shrink only to sizes whose pressure would be below this, so that the fleet does not swing
MAX_SHRINK = 0.2  # share of the replicas that may leave in `down_delay`: waits grow faster than the load
MAX_GROWTH = 2.0  # while new replicas start, requests wait longer however many there will be
BUSIEST = 0.05  # share of the replicas whose waits do not count: of many, one always computes a very long prompt
TREND_SECONDS = 30.0  # how far back the trend of the memory in use is taken


@dataclass(frozen=True, slots=True)
class AutoscalingSettings:
    min_replicas: int = 1  # 0: the fleet may shrink to nothing, and the first request waits for a cold start
    max_replicas: int = 8
    target_ttft: float = 1.0  # seconds from the arrival of a request to its first token
    target_used: float = 0.7  # share of KV blocks that open requests hold
    target_tpot: float | None = None  # seconds per output token
    cold_start: float = 20.0  # seconds until a new replica answers
    down_delay: float = 120.0  # seconds

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            problem = f"must be between 0 and max_replicas ({self.max_replicas}), got {self.min_replicas}"
            raise InvalidParameter("min_replicas", problem)
        for name in ("target_ttft", "target_used", "target_tpot"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise InvalidParameter(name, f"must be above 0, got {value}")
        for name in ("cold_start", "down_delay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidParameter(name, f"must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class FleetObservation:
    ready: int
    wait: float  # seconds for a first token, `fleet_wait` of the replicas
    used: float  # share of the KV blocks of all ready replicas that open requests hold
    tpot: float | None = None  # mean seconds per output token lately
    open_requests: int = 0


def fleet_wait(waits: Iterable[float]) -> float:
    """The longest of the replicas' waits for a first token, without those of the busiest ones of a large fleet."""
    ordered = sorted(waits)
    return ordered[math.ceil((1 - BUSIEST) * len(ordered)) - 1] if ordered else 0.0


class Autoscaler:
    def __init__(self, settings: AutoscalingSettings) -> None:
        self.settings = settings
        self._used: deque[tuple[float, float]] = deque()  # (time, blocks in use, in replicas' worth), oldest first
        self._wanted: deque[tuple[float, int]] = deque()  # (time, replicas), oldest first

    def desired(self, seen: FleetObservation, now: float) -> int:
        """The number of replicas to have, those that are starting included."""
        settings = self.settings
        if not self._wanted:  # the size at the start was chosen for a reason
            self._wanted.append((now, min(seen.ready, settings.max_replicas)))
        grow = math.ceil(seen.ready * self._pressure(seen, now) - 1e-9)
        if seen.open_requests:
            grow = max(grow, 1)
        stay = math.ceil(seen.ready * self._pressure(seen, now, trend=False) / SLACK - 1e-9)
        least = seen.ready - max(1, int(MAX_SHRINK * seen.ready))
        wanted = grow if grow > seen.ready else min(seen.ready, max(stay, grow, least))
        wanted = min(max(wanted, settings.min_replicas), settings.max_replicas)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - settings.down_delay:
            self._wanted.popleft()
        return max(count for _, count in self._wanted)

    def _pressure(self, seen: FleetObservation, now: float, trend: bool = True) -> float:
        settings = self.settings
        used = seen.used
        if trend and seen.ready:
            used += max(0.0, self._slope(seen, now)) * settings.cold_start / seen.ready
        pressures = [seen.wait / settings.target_ttft, used / settings.target_used]
        if settings.target_tpot and seen.tpot is not None:
            pressures.append(seen.tpot / settings.target_tpot)
        return min(max(pressures), MAX_GROWTH)

    def _slope(self, seen: FleetObservation, now: float) -> float:
        """By how many replicas' worth per second the blocks in use have grown."""
        history = self._used
        if not history or history[-1][0] < now:
            history.append((now, seen.used * seen.ready))
        while len(history) > 2 and history[1][0] <= now - TREND_SECONDS:
            history.popleft()
        (begin, first), (end, last) = history[0], history[-1]
        return (last - first) / (end - begin) if end > begin else 0.0

"""The search for the settings with which a replica keeps the targets of recorded traffic at the highest speed.

Traffic that comes twice as fast needs half as many replicas for the same number of requests, so the settings that keep
the targets at the highest speed are the cheapest. Speeds are powers of `RATIO`. Other settings are first tried at the
next speed above the best one so far, where a simulation ends as soon as too many requests have missed their targets:
most are rejected early, and only those that keep the targets there are followed further up.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from chairlift.core.targets import ServiceClass
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.load.trace_files import TraceEntry
from chairlift_lab.planning.prediction import ReplicaSettings, assign_classes, simulate_alone, trace_arrivals
from chairlift_lab.planning.what_if import SIMULATED, Changes, changed
from chairlift_lab.simulator.outcome import Arrival, RequestRecord
from chairlift_lab.simulator.step_cost import StepCost

RATIO = 1.02
FIRST_STEP = 4  # levels; each further one is twice as large
# Settings that do not keep the targets at the slowest speed do not keep them at all; at the fastest all come at once.
SLOWEST, FASTEST = (round(math.log(speed, RATIO)) for speed in (1 / 1024, 1024))

# What is searched, the likely best first: the sooner a good one is found, the sooner others are rejected.
STRATEGIES: Sequence[Mapping[str, Any]] = (
    *({"order": "slack"}, {"order": "edf", "budget": "slack"}, {"order": "edf", "budget": "knee"}),
    {"order": "slack", "budget": "knee"},
    *({"order": order, "budget": "fixed"} for order in ("edf", "slack", "shortest")),
    *({"order": "shortest", "budget": "slack"}, {"order": "boost", "budget": "fixed"}),
    *({"order": "boost", "budget": "slack"}, {"order": "fcfs", "budget": "slack"}, {"order": "fcfs", "budget": "knee"}),
    {"order": "fcfs", "budget": "fixed"},
)
SIZES: Mapping[str, tuple[int, int]] = {  # least and most; they are doubled and halved
    "max_batch_tokens": (256, 32_768),
    "max_batch_requests": (16, 1_024),
    "max_overtakes": (16, 2_048),
}
# The settings that someone might try one by one, to compare the search with.
GRID: Mapping[str, Sequence[Any]] = {
    "strategy": (*STRATEGIES[:2], {"order": "edf", "budget": "fixed"}, *STRATEGIES[-2:]),
    "max_batch_tokens": (512, 1_024, 2_048, 4_096, 8_192, 16_384),
    "max_batch_requests": (128, 256),
}


class _TooManyMisses(Exception):
    """More requests of a class have missed their targets than may."""


@dataclass
class Judge:
    """Says whether settings keep the targets of traffic at a speed."""

    entries: Sequence[TraceEntry]
    classes: Sequence[ServiceClass]
    settings: ReplicaSettings
    cost: StepCost
    share: float  # The share of each class that must meet its targets.
    seed: int = 0
    seen: dict[tuple[Any, ...], bool] = field(default_factory=dict)  # the answers, by settings and level

    @cached_property
    def recorded(self) -> list[Arrival]:
        """The traffic as it was recorded; requests without targets of their own get one of the classes."""
        drawn = trace_arrivals(list(self.entries))
        return list(assign_classes(drawn, self.classes, self.seed) if self.classes else drawn)

    def arrivals(self, speed: float) -> list[Arrival]:
        return [replace(arrival, time=arrival.time / speed) for arrival in self.recorded]

    def keeps(self, changes: Changes, level: int) -> bool:
        """Whether the targets are kept at the speed `RATIO` ** `level`."""
        key = (*sorted(changes.items()), level)
        if key not in self.seen:
            self.seen[key] = self._simulated(changes, RATIO**level)
        return self.seen[key]

    def _simulated(self, changes: Changes, speed: float) -> bool:
        arrivals = self.arrivals(speed)
        of_class = Counter(arrival.service_class for arrival in arrivals)
        left = {each: math.floor((1 - self.share) * count) for each, count in of_class.items()}

        def count_miss(record: RequestRecord) -> None:
            own = record.service_class
            if own is not None and not own.targets.met_by(record):
                left[own] -= 1
                if left[own] < 0:
                    raise _TooManyMisses

        try:
            simulate_alone(arrivals, changed(self.settings, changes).make(self.cost), count_miss)
        except _TooManyMisses:
            return False
        return True

    def highest(self, changes: Changes, kept: int, missed: int | None = None) -> int:
        """The highest level at which the targets are kept: above `kept`, where they are, and below `missed`, where they
        are not."""
        step = FIRST_STEP
        while missed is None and kept < FASTEST:
            level = min(kept + step, FASTEST)
            if self.keeps(changes, level):
                kept, step = level, 2 * step
            else:
                missed = level
        if missed is None:
            return kept
        while missed - kept > 1:
            middle = (kept + missed) // 2
            kept, missed = (middle, missed) if self.keeps(changes, middle) else (kept, middle)
        return kept

    def reach(self, changes: Changes) -> int | None:
        """The highest level at which the targets are kept, if there is one, from that of the recorded speed on."""
        level, missed, step = 0, None, FIRST_STEP
        while not self.keeps(changes, level):
            if level == SLOWEST:
                return None
            level, missed, step = max(level - step, SLOWEST), level, 2 * step
        return self.highest(changes, level, missed)


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings that were tried, and the level that they reached: None if they were no better than the best before."""

    changes: Changes
    level: int | None


@dataclass
class Search:
    """Tries settings and keeps the best."""

    judge: Judge
    best: Changes  # The first are those that the others are compared with.
    fixed: frozenset[str] = frozenset()  # options that stay as they were given
    note: Note = lambda text: None
    seconds: float = math.inf  # the search ends after this
    level: int | None = None
    trials: list[Trial] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    def run(self) -> None:
        """Try the present settings, then strategies and sizes in turn, until neither is an improvement any more."""
        end = self.clock() + self.seconds
        self.consider(self.best)
        while True:
            before = self.level
            self._try_all(self._strategies(), end)
            while self._try_all(self._sizes(), end):
                pass
            if self.level == before or self.clock() >= end:
                return

    def _try_all(self, candidates: Iterable[Changes], end: float) -> bool:
        """Whether any of them was an improvement."""
        before = self.level
        for changes in candidates:
            if self.clock() >= end:
                break
            self.consider(changes)
        return self.level != before

    def consider(self, changes: Changes) -> None:
        """Try settings once: those that were rejected at some speed would be at a higher one, too."""
        if any(trial.changes == changes for trial in self.trials):
            return
        self.note(f"{len(self.trials) + 1} settings: {described(changes)}")
        level = self.judge.reach(changes) if self.level is None else None
        if self.level is not None and self.judge.keeps(changes, self.level + 1):
            level = self.judge.highest(changes, self.level + 1)
        self.trials.append(Trial(changes, level))
        if level is not None:
            self.best, self.level = changes, level

    def _strategies(self) -> Iterator[Changes]:
        for strategy in STRATEGIES:
            if not self.fixed & strategy.keys():
                sizes = {name: value for name, value in self.best.items() if name in SIZES}
                yield dict(strategy) | sizes

    def _sizes(self) -> Iterator[Changes]:
        for (name, (least, most)), factor in product(SIZES.items(), (2, 0.5)):
            if name in self.fixed:
                continue
            value = self.best.get(name) or getattr(self.judge.settings, SIMULATED[name]) or 512
            size = int(value * factor)
            if least <= size <= most:
                changes = dict(self.best) | {name: size}
                if changes.get("max_batch_requests", 1) <= changes.get("max_batch_tokens", size):
                    yield changes


def grid() -> Iterator[Changes]:
    """All combinations of `GRID`."""
    for strategy, tokens, requests in product(*GRID.values()):
        yield dict(strategy) | {"max_batch_tokens": tokens, "max_batch_requests": requests}


def described(changes: Changes) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items())


def require_targets(entries: Sequence[TraceEntry], classes: Sequence[ServiceClass]) -> None:
    """Raise if there is nothing to search for, because no request has targets."""
    if not classes and not any(entry.targets.given for entry in entries):
        solution = (
            "give --target ttft:500,tpot:50, a --class for each kind of request, or a log whose requests have some"
        )
        raise InvalidParameter("target", f"no request has targets; {solution}")

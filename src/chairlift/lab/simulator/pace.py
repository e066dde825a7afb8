"""How fast a machine is from moment to moment.

The same step takes 10 ms now and 13 ms a little later: others use the same memory and caches, clocks rise and fall, and
now and then something interrupts. Such times come in stretches, and requests queue up in the slow ones, so that
percentiles of latency depend on them and not on the mean alone. Therefore a profile keeps, in their order, what its
steps should have taken by its prices and what they took. A simulated engine walks along that line: a piece of work
takes as long as the same amount of work took the machine there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from chairlift.errors import InvalidParameter

_DIGITS = 6  # microseconds


@dataclass(frozen=True, slots=True)
class Pace:
    """A line through (work done, time passed); after its end it begins again."""

    pieces: tuple[tuple[float, float], ...]  # (seconds of work by the prices, seconds it took)
    _work: list[float] = field(init=False, compare=False, repr=False)  # done before each piece, and in all
    _time: list[float] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.pieces or not all(work > 0 and took > 0 for work, took in self.pieces):
            raise InvalidParameter("pace", "must be pairs of numbers above 0, and at least one")
        object.__setattr__(self, "_work", list(accumulate((work for work, _ in self.pieces), initial=0.0)))
        object.__setattr__(self, "_time", list(accumulate((took for _, took in self.pieces), initial=0.0)))

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Pace | None:
        """Rounded as it is saved; None if there is nothing to learn from."""
        rounded = ((round(work, _DIGITS), round(took, _DIGITS)) for work, took in pairs)
        pieces = tuple((work, took) for work, took in rounded if work > 0 and took > 0)
        return cls(pieces) if pieces else None

    @classmethod
    def from_json(cls, saved: Sequence[Sequence[int]]) -> Pace:
        return cls(tuple((round(work * 1e-6, _DIGITS), round(took * 1e-6, _DIGITS)) for work, took in saved))

    def to_json(self) -> list[Any]:
        """In whole microseconds, which keeps files small."""
        return [[round(1e6 * work), round(1e6 * took)] for work, took in self.pieces]

    @property
    def total_work(self) -> float:
        return self._work[-1]

    def time_at(self, work: float) -> float:
        """How long it takes to get so much done from the beginning."""
        laps, rest = divmod(work, self._work[-1])
        index = bisect_right(self._work, rest, hi=len(self.pieces)) - 1
        amount, took = self.pieces[index]
        return laps * self._time[-1] + self._time[index] + (rest - self._work[index]) / amount * took


class Walk:
    """Somebody who works along a pace."""

    def __init__(self, pace: Pace, begin: float = 0.0) -> None:
        """`begin`: after which share of the line."""
        self._pace = pace
        self._done = begin * pace.total_work
        self._time = pace.time_at(self._done)
        self._ahead: list[tuple[float, float]] = []  # work done and time passed, now and after each step looked ahead

    def go(self, work: float) -> float:
        """Do it; return how long it takes."""
        before = self._time
        self._done += work
        self._time = self._pace.time_at(self._done)
        return self._time - before

    def look_ahead(self, work: Iterable[float]) -> list[float]:
        """How long each of these would take, one after the other."""
        self._ahead = [(done, self._pace.time_at(done)) for done in accumulate(work, initial=self._done)]
        return [later - earlier for (_, earlier), (_, later) in pairwise(self._ahead)]

    def go_ahead(self, steps: int) -> None:
        """Do the first so many of those last looked at."""
        self._done, self._time = self._ahead[steps]

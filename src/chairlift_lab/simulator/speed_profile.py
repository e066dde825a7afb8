"""The speed of a machine over time.

The duration of the same step varies with other programs, clock speeds and interrupts. Slow periods last for many steps,
and requests queue up in them, so latency percentiles depend on them and not only on the mean. Therefore a profile
records the predicted and the measured duration of its steps in order. A simulated engine moves along that line: an
amount of work takes as long as it took at the same point of the profile.
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
class SpeedProfile:
    """A line through (work done, time passed), which repeats after its end."""

    pieces: tuple[tuple[float, float], ...]  # (seconds of work by the prices, seconds it took)
    _work: list[float] = field(init=False, compare=False, repr=False)  # done before each piece, and in all
    _time: list[float] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.pieces or not all(work > 0 and took > 0 for work, took in self.pieces):
            raise InvalidParameter("pace", "must be pairs of numbers above 0, and at least one")
        object.__setattr__(self, "_work", list(accumulate((work for work, _ in self.pieces), initial=0.0)))
        object.__setattr__(self, "_time", list(accumulate((took for _, took in self.pieces), initial=0.0)))

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> SpeedProfile | None:
        """Build a profile, rounded as it is saved; None without any usable pair."""
        rounded = ((round(work, _DIGITS), round(took, _DIGITS)) for work, took in pairs)
        pieces = tuple((work, took) for work, took in rounded if work > 0 and took > 0)
        return cls(pieces) if pieces else None

    @classmethod
    def from_json(cls, saved: Sequence[Sequence[int]]) -> SpeedProfile:
        return cls(tuple((round(work * 1e-6, _DIGITS), round(took * 1e-6, _DIGITS)) for work, took in saved))

    def to_json(self) -> list[Any]:
        """Whole microseconds, to keep files small."""
        return [[round(1e6 * work), round(1e6 * took)] for work, took in self.pieces]

    @property
    def total_work(self) -> float:
        return self._work[-1]

    def time_at(self, work: float) -> float:
        """The time at which `work` is done."""
        laps, rest = divmod(work, self._work[-1])
        index = bisect_right(self._work, rest, hi=len(self.pieces)) - 1
        amount, took = self.pieces[index]
        return laps * self._time[-1] + self._time[index] + (rest - self._work[index]) / amount * took


class SpeedCursor:
    """A position on a speed profile."""

    def __init__(self, profile: SpeedProfile, begin: float = 0.0) -> None:
        """`begin`: the share of the profile to skip."""
        self._profile = profile
        self._done = begin * profile.total_work
        self._time = profile.time_at(self._done)
        self._ahead: list[tuple[float, float]] = []  # (work done, time), now and after each step looked ahead

    def advance(self, work: float) -> float:
        """Do an amount of work; return its duration."""
        before = self._time
        self._done += work
        self._time = self._profile.time_at(self._done)
        return self._time - before

    def look_ahead(self, work: Iterable[float]) -> list[float]:
        """The duration of each of these amounts of work, one after the other."""
        self._ahead = [(done, self._profile.time_at(done)) for done in accumulate(work, initial=self._done)]
        return [later - earlier for (_, earlier), (_, later) in pairwise(self._ahead)]

    def advance_steps(self, steps: int) -> None:
        """Do the first `steps` amounts of the last `look_ahead`."""
        self._done, self._time = self._ahead[steps]

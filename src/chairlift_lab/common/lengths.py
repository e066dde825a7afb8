"""Lengths with a given mean and spread."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class SpreadLengths:
    """Gamma-distributed lengths; `variation` is their standard deviation divided by their mean.

    0: all equal; 1: an exponential distribution; above 1: a few very long ones among many short ones.
    """

    mean: int
    variation: float
    longest: int  # longer draws are cut to this

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.longest:
            raise InvalidParameter("mean", f"must be between 1 and {self.longest}, got {self.mean}")
        if not 0 <= self.variation < float("inf"):
            raise InvalidParameter("variation", f"must be at least 0, got {self.variation}")

    def draw(self, source: random.Random) -> int:
        if self.variation == 0:
            return self.mean
        shape = self.variation**-2
        return min(max(1, round(source.gammavariate(shape, self.mean / shape))), self.longest)

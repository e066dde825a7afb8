"""When the requests of an open loop arrive: on their own time, however busy the server is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from chairlift.errors import InvalidParameter

ARRIVALS = ("poisson", "bursty", "uniform")
BURSTY = 0.25  # the shape of bursty arrivals unless another is given: gaps vary twice as much as Poisson's


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests per second, and the shape of the gamma distribution that the gaps between them are drawn from.

    The mean gap is 1 / rate for every shape; its coefficient of variation is 1 / √shape. A shape of 1 is a Poisson
    process, less comes in bursts, more is more even, and infinity is one request after the other at equal distances.
    """

    rate: float
    shape: float

    @classmethod
    def parse(cls, rate: float, kind: str, burstiness: float | None) -> Arrivals:
        if not 0 < rate < float("inf"):
            raise InvalidParameter("rate", f"must be a number of requests per second above 0, got {rate}")
        if kind not in ARRIVALS:
            raise InvalidParameter("arrivals", f"there is no {kind!r}; choose from {', '.join(ARRIVALS)}")
        if burstiness is not None and kind != "bursty":
            raise InvalidParameter("burstiness", "only goes with --arrivals bursty")
        if burstiness is not None and not 0 < burstiness < float("inf"):
            raise InvalidParameter("burstiness", f"must be above 0, got {burstiness}")
        shape = {"poisson": 1.0, "bursty": burstiness or BURSTY, "uniform": float("inf")}[kind]
        return cls(rate, shape)

    def times(self, seed: int) -> Iterator[float]:
        """Seconds from the start, without end. The first request comes at once."""
        source = random.Random(f"arrivals {seed}")
        return accumulate(self._gaps(source), initial=0.0)

    def _gaps(self, source: random.Random) -> Iterator[float]:
        mean = 1 / self.rate
        while True:
            yield mean if self.shape == float("inf") else source.gammavariate(self.shape, mean / self.shape)

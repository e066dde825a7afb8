"""Requests with the lengths and the common prefixes of a trace, and arrivals of an open loop."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from chairlift.errors import InvalidParameter
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.trace_files import TraceEntry


def trace_requests(
    vocabulary: Sequence[int], entries: Sequence[TraceEntry], *, seed: int, lengths: float = 1.0
) -> Iterator[BenchRequest]:
    """Prompts of the entries' lengths. Blocks with the same id have the same tokens; all else is different.

    `lengths` is what the entries were scaled by, and shortens the blocks too.
    """
    for index, entry in enumerate(entries):
        size, prompt = max(1, round(entry.block_tokens * lengths)), list[int]()
        for block in entry.blocks:
            prompt += random.Random(f"{seed} block {block}").choices(vocabulary, k=size)
        missing = entry.n_in - len(prompt)
        if missing > 0:
            prompt += random.Random(f"{seed} request {index}").choices(vocabulary, k=missing)
        yield BenchRequest(tuple(prompt[: entry.n_in]), entry.n_out)


ARRIVALS = ("poisson", "bursty", "uniform")
BURSTY = 0.25  # the default shape of bursty arrivals: gaps vary twice as much as those of a Poisson process


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests per second, and the shape of the gamma distribution of the gaps between them.

    The mean gap is 1 / rate for every shape; its coefficient of variation is 1 / √shape. A shape of 1 is a Poisson
    process, a smaller one is bursty, a larger one more even, and infinity gives equal gaps.
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
        """Endless arrival times in seconds from the start; the first request arrives at once."""
        source = random.Random(f"arrivals {seed}")
        return accumulate(self._gaps(source), initial=0.0)

    def _gaps(self, source: random.Random) -> Iterator[float]:
        mean = 1 / self.rate
        while True:
            yield mean if self.shape == float("inf") else source.gammavariate(self.shape, mean / self.shape)

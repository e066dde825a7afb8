"""The requests of `chairlift bench policies`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift_lab.common.lengths import SpreadLengths
from chairlift_lab.common.workload import BenchRequest, Workload
from chairlift_lab.report.lists import number_list

LONGEST = 8  # limit of output lengths, as a multiple of the mean
_PANEL = "Workload"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWorkload:
    """Requests whose output lengths vary.

    The batch is large compared to the arrival rate, as in most servers: filling a batch then takes time, which is the
    only difference between static and dynamic batches.
    """

    variations: Annotated[
        Sequence[float],
        number_list("Variations of the output lengths: standard deviation / mean.", kind=float, panel=_PANEL),
    ] = (0.2, 0.6, 1.2)
    requests: Annotated[int, typer.Option(help="Number of requests.", rich_help_panel=_PANEL)] = 64
    prompt: Annotated[int, typer.Option(help="Mean prompt tokens.", rich_help_panel=_PANEL)] = 24
    output: Annotated[int, typer.Option(help="Mean output tokens.", rich_help_panel=_PANEL)] = 20
    seats: Annotated[int, typer.Option("--concurrency", help="Requests per step.", rich_help_panel=_PANEL)] = 32
    load: Annotated[
        float,
        typer.Option(
            help="Rate of Poisson arrivals, as a share of the throughput of continuous batching.",
            rich_help_panel=_PANEL,
        ),
    ] = 0.7
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_PANEL)] = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "output", "seats", "load"):
            if not getattr(self, name) > 0:
                parameter = "concurrency" if name == "seats" else name
                raise InvalidParameter(parameter, f"must be above 0, got {getattr(self, name)}")
        if not self.variations or not all(0 <= value < float("inf") for value in self.variations):
            raise InvalidParameter("variations", f"must be numbers of at least 0, got {list(self.variations)}")

    def workload(self, vocabulary: Sequence[int], variation: float) -> Workload:
        """The same prompts for every variation; only the output lengths differ."""
        prompts, outputs = (random.Random(f"{part} {self.seed}") for part in ("prompts", "outputs"))
        prompt = SpreadLengths(self.prompt, 0.5, LONGEST * self.prompt)
        output = SpreadLengths(self.output, variation, LONGEST * self.output)
        return Workload(
            tuple(
                BenchRequest(tuple(prompts.choices(vocabulary, k=prompt.draw(prompts))), output.draw(outputs))
                for _ in range(self.requests)
            )
        )

    def poisson(self, rate: float) -> list[float]:
        """Arrival times of a Poisson process, in seconds."""
        source = random.Random(f"arrivals {self.seed}")
        return list(accumulate((source.expovariate(rate) for _ in range(self.requests - 1)), initial=0.0))

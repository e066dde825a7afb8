"""Every batching strategy on the same requests: all at once, and coming one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from chairlift.attention.backends import BACKENDS
from chairlift.core.policies.base import POLICIES
from chairlift.errors import InvalidParameter
from chairlift.lab.common.engine_run import measure_engine
from chairlift.lab.common.engines import EngineMaker
from chairlift.lab.common.lengths import SpreadLengths
from chairlift.lab.common.measure import Measurement
from chairlift.lab.common.timing import Note
from chairlift.lab.common.workload import BenchRequest, Workload

LONGEST = 8  # times the mean output: where lengths are cut off
AT_ONCE, POISSON = "at-once", "poisson"
ARRIVALS = (AT_ONCE, POISSON)


@dataclass(frozen=True, slots=True)
class Strategy:
    """When requests board, and how the attention of a batch is computed."""

    policy: str
    attention: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """ "static", or "static/padded"."""
        policy, _, attention = text.strip().partition("/")
        made = cls(policy, attention or "auto")
        if policy not in POLICIES.names() or made.attention not in ("auto", *BACKENDS.names()):
            choices = f"{', '.join(POLICIES.names())}, each alone or with /{', /'.join(BACKENDS.names())}"
            raise InvalidParameter("strategies", f"there is no {text.strip()!r}; choose from {choices}")
        return made

    def __str__(self) -> str:
        return self.policy if self.attention == "auto" else f"{self.policy}/{self.attention}"


CONTINUOUS = Strategy("continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesSettings:
    """Batches are large beside the rate at which requests come, as in most servers. That is where filling one takes
    time, which is all that static and dynamic batches differ in."""

    strategies: Sequence[Strategy] = (CONTINUOUS, Strategy("dynamic"), Strategy("static"))
    arrivals: Sequence[str] = ARRIVALS
    variations: Sequence[float] = (0.2, 0.6, 1.2)  # of the output lengths: standard deviation / mean
    requests: int = 64
    prompt: int = 24  # mean tokens
    output: int = 20
    seats: int = 32
    load: float = 0.7  # Poisson: requests per second, as a share of what continuous batching gets done at once
    max_delay_ms: float | None = None  # of dynamic batches
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "output", "seats", "load"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(name, f"must be above 0, got {getattr(self, name)}")
        if not self.variations or not all(0 <= value < float("inf") for value in self.variations):
            raise InvalidParameter("variations", f"must be numbers of at least 0, got {list(self.variations)}")
        for name in self.arrivals:
            if name not in ARRIVALS:
                raise InvalidParameter("arrivals", f"there is no {name!r}; choose from {', '.join(ARRIVALS)}")
        if not self.strategies or len(set(self.strategies)) < len(self.strategies):
            raise InvalidParameter("strategies", "name each of them once")

    def workload(self, vocabulary: Sequence[int], variation: float) -> Workload:
        """The prompts are the same for every variation; only how long the answers get differs."""
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
        source = random.Random(f"arrivals {self.seed}")
        return list(accumulate((source.expovariate(rate) for _ in range(self.requests - 1)), initial=0.0))


@dataclass(frozen=True, slots=True)
class PolicyPoint:
    strategy: Strategy
    arrivals: str
    variation: float
    rate: float | None  # requests per second, if they came one by one
    measured: Measurement

    def row(self) -> dict[str, Any]:
        named: dict[str, Any] = {
            "strategy": str(self.strategy),
            "policy": self.strategy.policy,
            "attention": self.strategy.attention,
        }
        named |= {"arrivals": self.arrivals, "variation": self.variation, "rate": self.rate}
        name = f"{self.strategy}, {self.arrivals}, variation {self.variation:g}"
        return self.measured.row(name) | named


def compare_policies(
    maker: EngineMaker, settings: PoliciesSettings, *, note: Note = lambda text: None
) -> list[PolicyPoint]:
    """By length variation, then by how requests come, then by strategy."""
    points: list[PolicyPoint] = []
    vocabulary = maker.vocabulary()
    for variation in settings.variations:
        workload = settings.workload(vocabulary, variation)
        reference: PolicyPoint | None = None  # continuous batching of all requests at once: what 100% load is
        for arrivals in settings.arrivals:
            rate = None
            if arrivals == POISSON:
                reference = reference or _measure(maker, settings, CONTINUOUS, workload, variation, None, note)
                rate = settings.load * settings.requests / reference.measured.seconds
            for strategy in settings.strategies:
                points.append(_measure(maker, settings, strategy, workload, variation, rate, note))
                if rate is None and strategy == CONTINUOUS:
                    reference = points[-1]
    return points


def _measure(
    maker: EngineMaker,
    settings: PoliciesSettings,
    strategy: Strategy,
    workload: Workload,
    variation: float,
    rate: float | None,
    note: Note,
) -> PolicyPoint:
    arrivals = AT_ONCE if rate is None else POISSON
    note(f"{strategy}, {arrivals}, length variation {variation:g}")
    engine = maker.engine(
        policy=strategy.policy,
        attention=strategy.attention,
        max_delay_ms=settings.max_delay_ms if strategy.policy == "dynamic" else None,
        max_batch_requests=settings.seats,
        prefix_caching=False,  # prompts of random tokens share nothing
    )
    times = None if rate is None else settings.poisson(rate)
    return PolicyPoint(
        strategy, arrivals, variation, rate, measure_engine(engine, workload, lambda tokens: None, times)
    )

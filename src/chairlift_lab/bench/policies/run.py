"""Batching policies on the same requests, which arrive at once or as a Poisson process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.attention.backends import BACKENDS
from chairlift.core.policies.base import POLICIES
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.bench.policies.options import PolicyWorkload
from chairlift_lab.common.engine_run import measure_engine
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.measure import Measurement
from chairlift_lab.common.workload import Workload

AT_ONCE, POISSON = "at-once", "poisson"
ARRIVALS = (AT_ONCE, POISSON)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A batching policy and an attention backend."""

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
class PoliciesSettings(PolicyWorkload):
    """Which strategies to compare, and on which arrivals."""

    strategies: Sequence[Strategy] = (CONTINUOUS, Strategy("dynamic"), Strategy("static"))
    arrivals: Sequence[str] = ARRIVALS
    max_delay_ms: float | None = None  # of dynamic batches

    def __post_init__(self) -> None:
        PolicyWorkload.__post_init__(self)
        for name in self.arrivals:
            if name not in ARRIVALS:
                raise InvalidParameter("arrivals", f"there is no {name!r}; choose from {', '.join(ARRIVALS)}")
        if not self.strategies or len(set(self.strategies)) < len(self.strategies):
            raise InvalidParameter("strategies", "must name each strategy once")


@dataclass(frozen=True, slots=True)
class PolicyPoint:
    strategy: Strategy
    arrivals: str
    variation: float
    rate: float | None  # requests per second of Poisson arrivals
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
    """One point for each variation, kind of arrivals and strategy, in this order."""
    points: list[PolicyPoint] = []
    vocabulary = maker.vocabulary()
    for variation in settings.variations:
        workload = settings.workload(vocabulary, variation)
        reference: PolicyPoint | None = None  # continuous batching of all requests at once: a load of 1
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
        prefix_caching=False,  # random prompts have no common prefixes
    )
    times = None if rate is None else settings.poisson(rate)
    return PolicyPoint(
        strategy, arrivals, variation, rate, measure_engine(engine, workload, lambda tokens: None, times)
    )

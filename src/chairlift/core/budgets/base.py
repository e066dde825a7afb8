"""The interface of a budget, which decides how many tokens and requests a step may have."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from chairlift.core.choices import make_choice
from chairlift.core.cost_model import CostModel
from chairlift.core.request import Request
from chairlift.core.step_limits import StepLimits
from chairlift.errors import InvalidParameter
from chairlift.registry import Registry


class BatchLoad:
    """The running and waiting requests before a step; subsets are computed on demand."""

    def __init__(self, running: Sequence[Request], waiting: Sequence[Request], now: float) -> None:
        self.running = running
        self.waiting = waiting
        self.now = now

    @cached_property
    def decoding(self) -> list[Request]:
        return [request for request in self.running if request.decoding and request.num_behind]

    @cached_property
    def prefilling(self) -> list[Request]:
        return [request for request in self.running if not request.decoding and request.num_behind]


class TokenBudget(ABC):
    """Decides the limits of every step."""

    options: ClassVar[frozenset[str]] = frozenset()  # Fields of the config, passed to the constructor as keywords.

    def __init__(self, most: StepLimits, cost: CostModel) -> None:
        """`most`: the configured limits, never exceeded. `cost`: predicts the duration of steps."""
        self.most = most
        self._cost = cost

    @abstractmethod
    def limits(self, load: BatchLoad) -> StepLimits:
        """Return the limits of the next step."""


BUDGETS: Registry[type[TokenBudget]] = Registry("budget", "chairlift.core.budgets")


def make_budget(
    name: str | None,
    cost: CostModel,
    *,
    max_batch_tokens: int,
    max_prefill_tokens: int | None = None,
    target_tpot_ms: float | None = None,
    target_ttft_ms: float | None = None,
) -> TokenBudget:
    """Build the budget called `name`; without a name, `latency` if a target is given, else `fixed`."""
    targets = {"target_tpot_ms": target_tpot_ms, "target_ttft_ms": target_ttft_ms}
    for parameter, target in targets.items():
        number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if target is not None and not (number and math.isfinite(target) and target > 0):
            raise InvalidParameter(parameter, f"must be a number of milliseconds above 0, got {target!r}")
    if name is None:
        name = "fixed" if target_tpot_ms is None and target_ttft_ms is None else "latency"
    return make_choice(BUDGETS, name, targets, StepLimits.most(max_batch_tokens, max_prefill_tokens), cost)


def check_budget(name: str | None, target_tpot_ms: float | None, target_ttft_ms: float | None) -> None:
    """Raise InvalidParameter if the budget cannot be built."""
    make_budget(name, CostModel(), max_batch_tokens=1, target_tpot_ms=target_tpot_ms, target_ttft_ms=target_ttft_ms)

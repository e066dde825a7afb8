"""The interface of a budget, which decides how many tokens and requests a step may have, and the simpler budgets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from chairlift.core.cost_model import CostModel, StepShape, chunk_kv
from chairlift.core.plan import LimitReason, StepLimits
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.registry import Registry, make_choice


@dataclass(eq=False)
class BatchLoad:
    """The running and waiting requests before a step; subsets are computed on demand."""

    running: Sequence[Request]
    waiting: Sequence[Request]
    now: float

    @cached_property
    def decoding(self) -> list[Request]:
        return [request for request in self.running if request.decoding and request.num_behind]

    @cached_property
    def prefilling(self) -> list[Request]:
        return [request for request in self.running if not request.decoding and request.num_behind]


class TokenBudget(ABC):
    """Decides the limits of every step."""

    options: ClassVar[frozenset[str]] = frozenset()  # Fields of the config, passed to the constructor as keywords.
    uses_targets: ClassVar[bool] = False  # whether the targets of requests have an effect

    def __init__(self, most: StepLimits, cost: CostModel) -> None:
        """`most`: the configured limits, never exceeded. `cost`: predicts the duration of steps."""
        self.most = most
        self._cost = cost

    @abstractmethod
    def limits(self, load: BatchLoad) -> StepLimits:
        """Return the limits of the next step."""


BUDGETS: Registry[type[TokenBudget]] = Registry("budget", "chairlift.core.budgets", grouped=True)
OFFLINE, ONLINE = "fixed", "knee"  # the defaults of `LLM`, and of servers and what simulates them


def default_budget(own: str | None, *, has_target: bool, otherwise: str = OFFLINE) -> str:
    """The budget that is used where none is named: `latency` with a target for all requests, else the order's own."""
    return "latency" if has_target else own or otherwise


@BUDGETS.register("fixed")
class FixedBudget(TokenBudget):
    """Always returns the configured limits."""

    @classmethod
    def of(cls, max_batch_tokens: int, max_prefill_tokens: int | None = None) -> FixedBudget:
        return cls(StepLimits.most(max_batch_tokens, max_prefill_tokens), CostModel())

    def limits(self, load: BatchLoad) -> StepLimits:
        return self.most


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
    name = name or default_budget(None, has_target=any(target is not None for target in targets.values()))
    return make_choice(BUDGETS, name, targets, StepLimits.most(max_batch_tokens, max_prefill_tokens), cost)


def check_budget(name: str | None, target_tpot_ms: float | None, target_ttft_ms: float | None) -> None:
    """Raise InvalidParameter if the budget cannot be built."""
    make_budget(name, CostModel(), max_batch_tokens=1, target_tpot_ms=target_tpot_ms, target_ttft_ms=target_ttft_ms)


_LEAST_CHUNK = 4  # the minimum for prompts, so that they do not starve
_FIRST_CHUNK = 32  # It counts until something is measured; each observed step at most doubles it.
_KNEE = 0.95  # A share of the highest throughput.
_LEAST_SPEED = 0.7  # A share of the highest speed of prompts, which they get however long the step is.
# A step with prompts takes up to as many times as long as its decodes alone. Prompts then get 4/5 of the time.
_LONGEST = 5.5
_TAIL_ALLOWANCE = 1.02  # share of the target that a late step may take; the few later ones stay within about 1.2
_MOST_CAUTION = 0.5  # lowest share of the target to plan for, however often steps are late


class StepForecast:
    """Predicts the time of the next step, with all decodes, as a function of its prompt tokens."""

    def __init__(self, cost: CostModel, load: BatchLoad) -> None:
        self._cost = cost
        self.decodes = len(load.decoding)
        self._decode_kv = sum(request.num_expected for request in load.decoding)
        prompts = load.prefilling
        self._num_prompts = max(1, len(prompts))
        self._context = sum(request.num_planned for request in prompts) // self._num_prompts

    def seconds(self, chunk: int) -> float:
        """The duration of a step with `chunk` prompt tokens, spread over the running prompts."""
        return self._seconds(chunk, self._num_prompts * chunk_kv(self._context, chunk // self._num_prompts))

    def tokens_per_second(self, chunk: int) -> float:
        """The throughput of many such steps, without the KV reads within a chunk, which add up to the same for any
        chunk size."""
        return (self.decodes + chunk) / max(self._seconds(chunk, chunk * self._context), 1e-9)

    def prompt_tokens_per_second(self, chunk: int) -> float:
        """The same without the decodes, which would be computed anyway."""
        return chunk / max(self._seconds(chunk, chunk * self._context), 1e-9)

    def _seconds(self, chunk: int, kv: int) -> float:
        prompts = self._num_prompts if chunk else 0
        return self._cost.predict(StepShape(self.decodes, chunk, self._decode_kv, kv, self.decodes + prompts))


class AdaptiveBudget(TokenBudget):
    """A budget that chooses the prompt tokens of each step from its predicted time: every running request waits for the
    whole step, so prompt tokens increase the inter-token time.

    It chooses among chunk sizes, limited to twice the largest measured, and decides only while prompts wait.
    """

    def __init__(self, most: StepLimits, cost: CostModel) -> None:
        super().__init__(most, cost)
        self._sizes = chunk_sizes(most.prefill_tokens)
        self._last = replace(most, reason=LimitReason.LEARNING)

    def limits(self, load: BatchLoad) -> StepLimits:
        if load.prefilling or load.waiting:  # The last decision stays if there are no prompts.
            self._last = self._decide(load)
        return self._last

    @abstractmethod
    def _decide(self, load: BatchLoad) -> StepLimits: ...

    def _known_sizes(self) -> Sequence[int]:
        """The sizes up to twice the largest measured chunk."""
        known = max(_FIRST_CHUNK, 2 * self._cost.largest_prefill)
        return self._sizes[: max(1, bisect_right(self._sizes, known))]

    def _chosen(self, forecast: StepForecast, chunk: int, reason: LimitReason) -> StepLimits:
        seconds = forecast.seconds(chunk) or None
        return replace(self.most, prefill_tokens=chunk, reason=reason, predicted_seconds=seconds)

    def _planned(self, target: float) -> float:
        """The step time to plan for, which is below the target if steps are often later than predicted."""
        return target * max(_MOST_CAUTION, min(1.0, _TAIL_ALLOWANCE / self._cost.tail))


def knee(speed: Callable[[int], float], sizes: Sequence[int], share: float = _KNEE) -> int:
    """The smallest of `sizes` whose speed, such as `StepForecast.tokens_per_second`, is close to the highest of all."""
    # Seconds are a convex function of tokens, so the speed has one peak.
    peak = max((*sizes[::8], sizes[-1]), key=speed)
    rising = sizes[: sizes.index(peak) + 1]
    return rising[bisect_left(rising, share * speed(peak), key=speed)]


def chunk_sizes(most: int) -> list[int]:
    """The chunk sizes to choose from: all small ones, then sixteen per doubling, so that decisions are stable."""
    sizes = list(range(min(_LEAST_CHUNK, most), min(most, 16)))
    size = 16
    while size < most:
        sizes.append(size)
        size += 1 << max(0, size.bit_length() - 5)
    return [*sizes, most]


@BUDGETS.register("knee")
class KneeBudget(AdaptiveBudget):
    """Chooses the smallest step in which prompts are nearly as fast as in the largest, since larger ones add latency
    for little gain, and none that takes many times as long as its decodes alone.

    Online, this is the default: it protects requests that decode without a configured target.
    """

    def _decide(self, load: BatchLoad) -> StepLimits:
        forecast, known = StepForecast(self._cost, load), self._known_sizes()[-1]
        if not forecast.decodes:
            return self._chosen(forecast, self.most.prefill_tokens, LimitReason.ALONE)
        speed, longest = forecast.prompt_tokens_per_second, _LONGEST * forecast.seconds(0)
        short = self._sizes[max(1, bisect_right(self._sizes, longest, key=forecast.seconds)) - 1]
        least, useful = knee(speed, self._sizes, _LEAST_SPEED), knee(speed, self._sizes)
        chunk = max(least, min(short, useful))
        if chunk > known:
            return self._chosen(forecast, known, LimitReason.LEARNING)
        return self._chosen(forecast, chunk, LimitReason.SHORT if least < short < useful else LimitReason.KNEE)

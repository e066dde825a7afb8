"""What the adaptive budgets share: they choose the prompt tokens of each step from its predicted time.

Every running request waits for the whole step, so prompt tokens are paid for in inter-token time.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from chairlift.core.budgets.base import BatchLoad, TokenBudget
from chairlift.core.cost_model import CostModel, StepShape, chunk_kv
from chairlift.core.step_limits import LimitReason, StepLimits

_LEAST_CHUNK = 4  # prompts always get this much: they must not starve
_FIRST_CHUNK = 32  # before anything is measured; doubles at most with each step observed
_KNEE = 0.95  # of the highest throughput


class StepForecast:
    """Predicts the time of the next step, all decodes included, as a function of its prompt tokens."""

    def __init__(self, cost: CostModel, load: BatchLoad) -> None:
        self._cost = cost
        self.decodes = len(load.decoding)
        self._decode_kv = sum(request.num_expected for request in load.decoding)
        lanes = load.prefilling
        self._lanes = max(1, len(lanes))
        self._context = sum(request.num_planned for request in lanes) // self._lanes

    def seconds(self, chunk: int) -> float:
        """The duration of a step with `chunk` prompt tokens, spread over the running prompts."""
        return self._seconds(chunk, self._lanes * chunk_kv(self._context, chunk // self._lanes))

    def tokens_per_second(self, chunk: int) -> float:
        """The throughput of many such steps. Later tokens of a prompt read more, but that costs the same in chunks of
        any size."""
        return (self.decodes + chunk) / max(self._seconds(chunk, chunk * self._context), 1e-9)

    def _seconds(self, chunk: int, kv: int) -> float:
        lanes = self._lanes if chunk else 0
        return self._cost.predict(StepShape(self.decodes, chunk, self._decode_kv, kv, self.decodes + lanes))


class AdaptiveBudget(TokenBudget):
    """Offers sizes to choose from, is careful while little is known, and decides anew only if a prompt waits."""

    def __init__(self, most: StepLimits, cost: CostModel) -> None:
        super().__init__(most, cost)
        self._sizes = chunk_sizes(most.prefill_tokens)
        self._last = replace(most, reason=LimitReason.LEARNING)

    def limits(self, load: BatchLoad) -> StepLimits:
        if load.prefilling or load.waiting:  # else no prompt needs a decision, and the last one may stand
            self._last = self._decide(load)
        return self._last

    @abstractmethod
    def _decide(self, load: BatchLoad) -> StepLimits: ...

    def _known_sizes(self) -> Sequence[int]:
        """The sizes that are not far beyond what was measured."""
        known = max(_FIRST_CHUNK, 2 * self._cost.largest_prefill)
        return self._sizes[: max(1, bisect_right(self._sizes, known))]

    def _chosen(self, forecast: StepForecast, chunk: int, reason: LimitReason) -> StepLimits:
        seconds = forecast.seconds(chunk) or None
        return replace(self.most, prefill_tokens=chunk, reason=reason, predicted_seconds=seconds)


def knee(forecast: StepForecast, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that comes close to the highest throughput predicted for any of them."""
    # Tokens rise in a line and seconds in a line that only bends upwards: throughput has one peak.
    peak = max((*sizes[::8], sizes[-1]), key=forecast.tokens_per_second)
    rising = sizes[: sizes.index(peak) + 1]
    enough = _KNEE * forecast.tokens_per_second(peak)
    return rising[bisect_left(rising, enough, key=forecast.tokens_per_second)]


def chunk_sizes(most: int) -> list[int]:
    """The sizes to choose from: every one at first, then sixteen for each doubling, so that decisions do not
    flicker."""
    sizes = list(range(min(_LEAST_CHUNK, most), min(most, 16)))
    size = 16
    while size < most:
        sizes.append(size)
        size += 1 << max(0, size.bit_length() - 5)
    return [*sizes, most]

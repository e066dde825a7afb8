"""The budget `latency`: as many prompt tokens as latency targets allow."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from chairlift.core.budgets.base import BUDGETS, AdaptiveBudget, BatchLoad, StepForecast, knee
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.plan import LimitReason, StepLimits
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter

_ROOM_FOR_PROMPTS = 16  # prompt tokens that must fit beside the decodes of all slots within the target
_FIRST_SLOTS = 4  # It counts until something is measured; each observed step at most doubles it.
_LOOK_AHEAD = 64  # waiting requests that are checked against target_ttft_ms


@BUDGETS.register("latency")
class LatencyBudget(AdaptiveBudget):
    """Limits steps to meet a target time per output token, a target time to first token, or both.

    - `target_tpot_ms` alone: the largest chunk that fits beside the decodes.
    - `target_ttft_ms` alone: the smallest chunk with which all waiting prompts meet it.
    - both: the smallest chunk that meets the latter, but at least the knee and at most the largest that fits.
    """

    options = frozenset({"target_tpot_ms", "target_ttft_ms"})

    def __init__(
        self,
        most: StepLimits,
        cost: CostModel,
        target_tpot_ms: float | None = None,
        target_ttft_ms: float | None = None,
    ) -> None:
        if target_tpot_ms is None and target_ttft_ms is None:
            raise InvalidParameter("budget", "latency needs a target: give target_tpot_ms, target_ttft_ms or both")
        super().__init__(most, cost)
        self._tpot = None if target_tpot_ms is None else target_tpot_ms / 1e3  # seconds from here on
        self._ttft = None if target_ttft_ms is None else target_ttft_ms / 1e3

    def _decide(self, load: BatchLoad) -> StepLimits:
        forecast = StepForecast(self._cost, load)
        limits = self._choose(forecast, load)
        if self._tpot is None:
            return replace(limits, target_seconds=None)
        slots = self._slots(forecast, load, self._planned(self._tpot))
        return replace(limits, slots=slots, target_seconds=self._tpot)

    def _choose(self, forecast: StepForecast, load: BatchLoad) -> StepLimits:
        if not forecast.decodes:
            return self._chosen(forecast, self.most.prefill_tokens, LimitReason.ALONE)
        fits, reason = self._largest_that_fits(forecast)
        if self._ttft is None:
            return self._chosen(forecast, fits, reason)
        needed, reason_needed = self._smallest_in_time(forecast, load)
        if self._tpot is not None:
            needed = max(needed, knee(forecast.tokens_per_second, self._sizes))
        return self._chosen(forecast, *min((needed, reason_needed), (fits, reason), key=lambda choice: choice[0]))

    def _largest_that_fits(self, forecast: StepForecast) -> tuple[int, LimitReason]:
        sizes = self._known_sizes()
        beyond = LimitReason.LEARNING if sizes[-1] < self._sizes[-1] else LimitReason.FIXED
        if self._tpot is None:
            return sizes[-1], beyond
        target = self._planned(self._tpot) / self._cost.slowdown
        if forecast.seconds(sizes[-1]) <= target:
            return sizes[-1], beyond
        num_fitting = bisect_right(sizes, target, key=forecast.seconds)
        if num_fitting:
            return sizes[num_fitting - 1], LimitReason.TPOT
        alone = forecast.seconds(0)
        return sizes[0], LimitReason.FLOOR if alone > self._tpot else LimitReason.TPOT

    def _smallest_in_time(self, forecast: StepForecast, load: BatchLoad) -> tuple[int, LimitReason]:
        assert self._ttft is not None
        needed = tokens_per_second_needed((*load.prefilling, *load.waiting[:_LOOK_AHEAD]), load.now, self._ttft)
        sizes = self._known_sizes()
        speeds = [size / max(forecast.seconds(size), 1e-9) for size in sizes]
        for size, speed in zip(sizes, speeds, strict=True):
            if speed >= needed:
                return size, LimitReason.TTFT
        return sizes[speeds.index(max(speeds))], LimitReason.LATE

    def _slots(self, forecast: StepForecast, load: BatchLoad, target: float) -> int:
        """The number of slots with which decoding all of them, plus a small chunk, meets the target."""
        requests = (*load.running, *load.waiting[:1])
        context = sum(request.num_expected for request in requests) // len(requests)

        def seconds(slots: int) -> float:
            return self._cost.predict(StepShape(slots, _ROOM_FOR_PROMPTS, slots * context, 0, slots + 1))

        known = max(_FIRST_SLOTS, 2 * self._cost.largest_decode)
        modelled = bisect_right(range(1, known + 1), target, key=seconds)
        # Twice the decodes take at most twice as long. This bound holds before the coefficients have settled, and
        # they could not settle if no request were admitted.
        proportional = int(forecast.decodes * target / max(forecast.seconds(0), 1e-9))
        return max(1, modelled, min(proportional, known))


def tokens_per_second_needed(queue: Sequence[Request], now: float, target_ttft: float) -> float:
    """The speed at which the prompts of `queue`, in order, must be computed for every first token to meet the
    target."""
    ahead, needed = 0, 0.0
    for request in queue:
        ahead += request.num_behind
        left = request.arrival + target_ttft - now
        if request.num_output == 0:
            needed = max(needed, ahead / left if left > 0 else math.inf)
    return needed

"""The budget `knee`: steps only as large as throughput needs."""

from __future__ import annotations

from chairlift.core.budgets.base import BUDGETS, AdaptiveBudget, BatchLoad, StepForecast, knee
from chairlift.core.plan import LimitReason, StepLimits


@BUDGETS.register("knee")
class KneeBudget(AdaptiveBudget):
    """Chooses the smallest step close to the highest throughput; larger ones add latency for little gain."""

    def _decide(self, load: BatchLoad) -> StepLimits:
        forecast, known = StepForecast(self._cost, load), self._known_sizes()[-1]
        if not forecast.decodes:
            return self._chosen(forecast, self.most.prefill_tokens, LimitReason.ALONE)
        chunk = knee(forecast, self._sizes)
        if chunk > known:
            return self._chosen(forecast, known, LimitReason.LEARNING)
        return self._chosen(forecast, chunk, LimitReason.KNEE)

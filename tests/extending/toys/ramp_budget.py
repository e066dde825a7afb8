"""A budget that starts with small steps and lets them grow, as a machine that is still warming up may need."""

from __future__ import annotations

from dataclasses import replace

from chairlift.core.budgets.base import BUDGETS, BatchLoad, TokenBudget
from chairlift.core.plan import StepLimits


@BUDGETS.register("ramp")
class RampBudget(TokenBudget):
    """Two prompt tokens in the first step, and twice as many in each step after it, up to the configured limit."""

    chunk = 2

    def limits(self, load: BatchLoad) -> StepLimits:
        chunk, self.chunk = self.chunk, min(2 * self.chunk, self.most.prefill_tokens)
        return replace(self.most, prefill_tokens=min(chunk, self.most.prefill_tokens))

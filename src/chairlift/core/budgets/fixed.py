"""The budget `fixed`: the same limits in every step."""

from __future__ import annotations

from chairlift.core.budgets.base import BUDGETS, BatchLoad, TokenBudget
from chairlift.core.cost_model import CostModel
from chairlift.core.plan import StepLimits


@BUDGETS.register("fixed")
class FixedBudget(TokenBudget):
    """Always returns the configured limits."""

    @classmethod
    def of(cls, max_batch_tokens: int, max_prefill_tokens: int | None = None) -> FixedBudget:
        return cls(StepLimits.most(max_batch_tokens, max_prefill_tokens), CostModel())

    def limits(self, load: BatchLoad) -> StepLimits:
        return self.most

"""How many tokens a step may carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class StepLimits:
    tokens: int  # all tokens of the step
    prefill_tokens: int  # those that are not decodes


class TokenBudget(Protocol):
    def limits(self) -> StepLimits:
        """The limits of the next step."""
        ...


class FixedBudget:
    """The same limits at every step."""

    def __init__(self, max_batch_tokens: int, max_prefill_tokens: int | None = None) -> None:
        if max_batch_tokens < 1:
            raise InvalidParameter("max_batch_tokens", f"must be at least 1, got {max_batch_tokens}")
        if max_prefill_tokens is not None and max_prefill_tokens < 1:
            raise InvalidParameter("max_prefill_tokens", f"must be at least 1, got {max_prefill_tokens}")
        self._limits = StepLimits(max_batch_tokens, min(max_prefill_tokens or max_batch_tokens, max_batch_tokens))

    def limits(self) -> StepLimits:
        return self._limits

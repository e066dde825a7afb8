"""The limits of one step, set by a budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from chairlift.errors import InvalidParameter

NO_LIMIT = 2**31


class LimitReason(StrEnum):
    FIXED = "as configured"
    LEARNING = "twice what was measured so far: larger steps are still unknown"
    ALONE = "no running request is decoding, so none waits for this step"
    TPOT = "the most that keeps the step inside target_tpot_ms"
    FLOOR = "the decodes alone take longer than target_tpot_ms; prompts get the least that keeps them moving"
    TTFT = "the least that keeps requests without a first token inside target_ttft_ms"
    LATE = "a request will miss target_ttft_ms; this is what computes prompts fastest"
    KNEE = "the least that comes close to the highest throughput"


@dataclass(frozen=True, slots=True)
class StepLimits:
    tokens: int  # all tokens of the step
    prefill_tokens: int  # the part of them that are not decodes
    slots: int = NO_LIMIT  # The limit of admission; running requests stay.
    reason: LimitReason = LimitReason.FIXED  # why `prefill_tokens` has this value
    predicted_seconds: float | None = field(default=None, compare=False)  # The time of a step at these limits.
    target_seconds: float | None = field(default=None, compare=False)  # the latency target, if any

    @classmethod
    def most(cls, max_batch_tokens: int, max_prefill_tokens: int | None = None) -> StepLimits:
        """Build the limits that the config sets."""
        if max_batch_tokens < 1:
            raise InvalidParameter("max_batch_tokens", f"must be at least 1, got {max_batch_tokens}")
        if max_prefill_tokens is not None and max_prefill_tokens < 1:
            raise InvalidParameter("max_prefill_tokens", f"must be at least 1, got {max_prefill_tokens}")
        return cls(max_batch_tokens, min(max_prefill_tokens or max_batch_tokens, max_batch_tokens))

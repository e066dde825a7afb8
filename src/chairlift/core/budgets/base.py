"""How many tokens a step may carry, and how many requests may share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from chairlift.core.request import Request
from chairlift.errors import InvalidParameter

NO_LIMIT = 2**31


class LimitReason(StrEnum):
    FIXED = "as configured"
    LEARNING = "twice what was measured so far: larger steps are still unknown"
    ALONE = "nobody on board is decoding, so nobody waits for this step"
    TPOT = "the most that keeps the step inside target_tpot_ms"
    FLOOR = "the decodes alone take longer than target_tpot_ms; prompts get the least that keeps them moving"
    TTFT = "the least that keeps those without a first token inside target_ttft_ms"
    LATE = "someone will miss target_ttft_ms; this is what computes prompts fastest"
    KNEE = "the least that comes close to the highest throughput"


@dataclass(frozen=True, slots=True)
class StepLimits:
    tokens: int  # all tokens of the step
    prefill_tokens: int  # those that are not decodes
    seats: int = NO_LIMIT  # nobody boards beyond this many; those on board stay
    reason: LimitReason = LimitReason.FIXED  # of `prefill_tokens`
    predicted_seconds: float | None = field(default=None, compare=False)  # of a step as full as this allows
    target_seconds: float | None = field(default=None, compare=False)  # what that was held against


class Load:
    """What the next step finds: who is on board and who waits. Worked out only when a budget asks for it."""

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


class TokenBudget(Protocol):
    def limits(self, load: Load) -> StepLimits:
        """The limits of the next step."""
        ...


class FixedBudget:
    """The same limits at every step."""

    def __init__(self, max_batch_tokens: int, max_prefill_tokens: int | None = None) -> None:
        if max_batch_tokens < 1:
            raise InvalidParameter("max_batch_tokens", f"must be at least 1, got {max_batch_tokens}")
        if max_prefill_tokens is not None and max_prefill_tokens < 1:
            raise InvalidParameter("max_prefill_tokens", f"must be at least 1, got {max_prefill_tokens}")
        self.most = StepLimits(max_batch_tokens, min(max_prefill_tokens or max_batch_tokens, max_batch_tokens))

    def limits(self, load: Load) -> StepLimits:
        return self.most

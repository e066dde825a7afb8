"""Continuous batching: a free slot is used in the next step."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.policies.base import POLICIES, Policy, PolicyDecision
from chairlift.core.request import Request
from chairlift.core.scheduler.waiting_queue import WaitingQueue


@POLICIES.register("continuous")
class ContinuousPolicy(Policy):
    """Makes every waiting request a candidate in every step."""

    name = "continuous"
    always_open = True

    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        return PolicyDecision(waiting.in_admission_order())

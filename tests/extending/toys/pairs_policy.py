"""A policy that runs at most two requests at a time, whatever the size of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from chairlift.core.policies.base import POLICIES, Policy, PolicyDecision
from chairlift.core.request import Request
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason


@POLICIES.register("pairs")
class PairsPolicy(Policy):
    """Admits waiting requests while fewer than two are running."""

    name = "pairs"

    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        room = max(0, 2 - len(running))
        return PolicyDecision(islice(waiting.in_admission_order(), room), WaitReason.BATCH_RUNNING)

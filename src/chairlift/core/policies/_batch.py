"""Base of the static and the dynamic policy, which admit requests in batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

from chairlift.core.policies.base import Policy, PolicyDecision
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason
from chairlift.errors import InvalidParameter


class BatchPolicy(Policy):
    """Admits a batch together, and no other request until its last member has finished.

    With no request running, a batch of all waiting requests (at most one per slot) is released when

    - there are enough to fill it, or
    - the oldest has waited for `max_delay_ms`, or
    - no more are expected (`Scheduler.expect_no_more`), as with a list of prompts.

    If the step's budget does not admit the whole batch at once, the rest follows in the next steps; a preempted member
    is admitted again as soon as it fits.
    """

    options = frozenset({"max_delay_ms"})
    keeps_slots = True
    default_delay_ms: ClassVar[float]

    def __init__(self, max_delay_ms: float | None = None) -> None:
        delay = self.default_delay_ms if max_delay_ms is None else max_delay_ms
        if not isinstance(delay, (int, float)) or not 0 <= delay < float("inf"):
            raise InvalidParameter("max_delay_ms", f"must be a number of at least 0, got {max_delay_ms!r}")
        self.max_delay = delay / 1000
        self._batch: list[Request] = []  # the requests released together

    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        if not running:
            opens_at = self.opens_at(waiting, slots)
            if opens_at is not None and now < opens_at:
                return PolicyDecision((), WaitReason.BATCH_FILLING)
            self._batch = list(islice(waiting.in_admission_order(), slots))
        return PolicyDecision(sorted(self._members_waiting(), key=waiting.ordering.rank), WaitReason.BATCH_RUNNING)

    def opens_at(self, waiting: WaitingQueue, slots: int) -> float | None:
        full = len(waiting) >= slots
        if full or self._members_waiting() or not waiting.may_grow:
            return None
        return waiting.oldest.arrival + self.max_delay

    @property
    def closed_until_batch_ends(self) -> bool:
        return not self._members_waiting()

    def _members_waiting(self) -> list[Request]:
        """Members of the last batch that are not admitted yet or were preempted."""
        return [request for request in self._batch if request.status is Status.WAITING]

"""The interface of speculative decoding, which `chairlift.speculation` implements."""

from __future__ import annotations

from typing import Protocol

from chairlift.core.plan import StepResult
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.scheduler.state import SchedulerState


class Speculation(Protocol):
    """Adds draft tokens to step plans and learns from the results."""

    drafting: bool  # whether upcoming steps carry drafts, so that each must be planned after the last one is read

    @property
    def speedup(self) -> float:
        """Estimated tokens per second relative to decoding without drafts."""
        ...

    def add_drafts(self, state: SchedulerState, plan: PlanBuilder) -> None:
        """Add draft tokens to the decodes of a plan, within the memory and token budget that is left."""
        ...

    def observe(self, result: StepResult, seconds: float, waited: bool = False, typical: bool = True) -> float:
        """Record a step's result and duration; return the seconds that were not spent on proposing drafts.

        `waited`: the step was planned late, after the result of the one before, for the sake of drafts.
        `typical`: later steps of the same shape will take about as long (not so if a CUDA graph was captured).
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop all state of a finished request."""
        ...

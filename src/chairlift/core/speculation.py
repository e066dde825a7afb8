"""What the scheduler and the engine need of speculative decoding; `chairlift.speculation` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from chairlift.core.plan import StepResult
from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.request import Request

if TYPE_CHECKING:
    from chairlift.core.scheduler.state import SchedulerState


class Speculation(Protocol):
    """Adds draft tokens to step plans and learns from how many were accepted."""

    guesses: bool  # whether upcoming steps carry drafts, so that each must be planned after the last one is read

    @property
    def speedup(self) -> float:
        """Estimated tokens per second relative to decoding without drafts."""
        ...

    def add_drafts(self, state: SchedulerState, plan: PlanBuilder) -> None:
        """Add draft tokens to the decodes of a plan, within the memory and token budget that is left."""
        ...

    def note_step(self, result: StepResult, seconds: float, waited: bool = False, typical: bool = True) -> float:
        """Record a step's duration; return the seconds that were not spent on proposing drafts."""
        ...

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        """Record how many of a request's drafts were accepted."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop all state of a finished request."""
        ...

"""What the engine needs besides its scheduler: what computes a step (a model on a CPU or GPU, or a fake one), and what
proposes draft tokens for it, which `chairlift.speculation` implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from chairlift.core.plan import PlanBuilder, StepPlan, StepResult
from chairlift.core.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """The optional features of an executor."""

    steps_ahead: int = 0  # steps that may be launched before the result of an earlier one is read
    beam_search: bool = False  # whether results contain candidates for beams
    labels: bool = False  # requests may ask for the numbers of a classifier's labels
    hidden_size: int = 0  # size of the vectors that prompts are pooled to; 0: results have no prompt outputs
    max_drafts: int | None = None  # draft tokens that fit into one step; None: limited by the token budget only


class PendingStep(Protocol):
    """A launched step, which may still be running."""

    @property
    def typical(self) -> bool:
        """Whether later steps of the same shape will take about as long."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The step of an executor whose `launch` returns only when the step is done."""

    computed: StepResult
    typical: bool = True

    def result(self) -> StepResult:
        return self.computed


class Executor(ABC):
    """Computes the steps that the scheduler plans. Steps are launched, and their results are read, in order."""

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities()

    @abstractmethod
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. It begins with the block copies of its plan: swap-outs, swap-ins, then the copies of its
        chunks."""

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and wait for its result."""
        return self.launch(plan).result()

    def prepare(self) -> bool:
        """Do one unit of preparation for later steps while the engine is idle; return False if none is left."""
        return False

    def forget(self, request_id: str) -> None:  # noqa: B027 (most executors have no such state)
        """Drop all state of a request that has ended, or whose steps were abandoned."""

    def close(self) -> None:  # noqa: B027 (most executors have no threads)
        """End all threads; no further step comes."""


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

"""The interface between the engine and what computes a step: a model on a CPU or GPU, or a fake one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from chairlift.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """The optional features of an executor."""

    steps_ahead: int = 0  # steps that may be launched before the result of an earlier one is read
    beam_search: bool = False  # whether results contain candidates for beams
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

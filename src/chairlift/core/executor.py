"""The seam between the engine and what computes a step: a model on a CPU or a GPU, or a stand-in for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from chairlift.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """What an executor can do beyond computing one step after the other."""

    steps_ahead: int = 0  # steps that may be launched before the result of an earlier one is read
    beam_search: bool = False  # whether results have the candidates of beams
    max_drafts: int | None = None  # draft tokens that one step has room for; None: as many as its token budget


class PendingStep(Protocol):
    """A step that was launched and may still be running."""

    @property
    def typical(self) -> bool:
        """Whether launching it took as long as launching later steps of its kind will take."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The pending step of an executor that computes a step before `launch` returns."""

    computed: StepResult
    typical: bool = True

    def result(self) -> StepResult:
        return self.computed


class Executor(ABC):
    """Computes the steps that the scheduler plans. Steps are launched, and their results read, in the plans' order."""

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities()

    @abstractmethod
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. Its block copies and swaps come first: outs, ins, then the copies of its chunks."""

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and wait for its result."""
        return self.launch(plan).result()

    def prepare(self) -> bool:
        """Do one piece of work for later steps while there is nothing to run; False if none is left."""
        return False

    def forget(self, request_id: str) -> None:  # noqa: B027 (most executors keep nothing)
        """Drop what is kept for a request that has ended, or whose steps were lost."""

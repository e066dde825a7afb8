"""What comes of a step: on the device, and as the result that the scheduler reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Staging
from chairlift.core.plan import Candidates, Chunk, PromptOutputs, StepPlan, StepResult, StepTiming, TokenLogprobs
from chairlift.models.base import HiddenStates
from chairlift.runner.gpu.packing import PackedStep


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A step's batch and what the model computed for all its tokens: for a draft network, or for prompt outputs."""

    batch: StepBatch
    attention: StepAttention
    hidden: HiddenStates


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step on the device; a captured one is overwritten by the next of its shape."""

    logits: Tensor  # [samples, vocab]
    tokens: Tensor  # [samples] int32
    output: ModelOutput | None  # None if only the sampled rows are needed


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one request: one, and one more for each accepted draft."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that runs on the device while the host does something else."""

    plan: StepPlan
    packed: PackedStep
    staging: Staging
    from_host: dict[int, SampledTokens]  # The keys are indices among the chunks that sample.
    candidates: dict[str, Candidates]
    prompts: PromptOutputs
    build_seconds: float
    typical: bool  # whether later steps of its shape take as long: not if it was captured, or soon will be
    _read: list[StepResult] = field(default_factory=list)  # its result, once it was read

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        if not self._read:
            self._read.append(self._wait())
        return self._read[0]

    def _wait(self) -> StepResult:
        self.staging.finished.synchronize()
        tokens: list[int] = self.staging.results[: self.packed.num_sampled].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        accepted: dict[str, int] = {}
        if self.from_host or len(tokens) > len(self.packed.chunks):
            tokens, logprobs, accepted = self._verify(tokens)
        seconds = self.staging.started.elapsed_time(self.staging.finished) * 1e-3
        timing = StepTiming(build=self.build_seconds, forward=seconds)
        return StepResult(
            self.plan, tokens, logprobs, timing, self.plan.idle_rows, accepted, self.candidates, self.prompts
        )

    def _verify(self, sampled: Sequence[int]) -> tuple[list[int], list[TokenLogprobs | None], dict[str, int]]:
        """Each request's tokens up to the first that differs from its draft."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        accepted: dict[str, int] = {}
        row = 0
        for index, chunk in enumerate(self.packed.chunks):
            own = self.from_host.get(index) or _verified(chunk, sampled[row : row + chunk.num_scored])
            row += chunk.num_scored
            tokens += own.tokens
            logprobs += own.logprobs
            if len(own.tokens) > 1:
                accepted[chunk.request.id] = len(own.tokens) - 1
        return tokens, logprobs, accepted


def _verified(chunk: Chunk, sampled: Sequence[int]) -> SampledTokens:
    """Each token was sampled as if the drafts before it were right."""
    accepted = 0
    while accepted < len(chunk.drafts) and sampled[accepted] == chunk.drafts[accepted]:
        accepted += 1
    return SampledTokens(sampled[: accepted + 1], [None] * (accepted + 1))

"""What comes of a step: on the device, and as the result that the scheduler reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Slots, Staging
from chairlift.attention.storage import sent
from chairlift.core.plan import Candidates, Chunk, PromptOutputs, StepPlan, StepResult, StepTiming, TokenLogprobs
from chairlift.models.base import HiddenStates
from chairlift.runner.gpu.packing import PackedStep
from chairlift.sampling.sampler import Sampler
from chairlift.speculation.drafter import Drafter
from chairlift.structured.output import MaskJob, StructuredOutput


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
            found = self.from_host.get(index) or _verified(chunk, sampled[row : row + chunk.num_scored])
            row += chunk.num_scored
            tokens += found.tokens
            logprobs += found.logprobs
            if len(found.tokens) > 1:
                accepted[chunk.request.id] = len(found.tokens) - 1
        return tokens, logprobs, accepted


def _verified(chunk: Chunk, sampled: Sequence[int]) -> SampledTokens:
    """Each token was sampled as if the drafts before it were right."""
    accepted = 0
    while accepted < len(chunk.drafts) and sampled[accepted] == chunk.drafts[accepted]:
        accepted += 1
    return SampledTokens(sampled[: accepted + 1], [None] * (accepted + 1))


class HostSampling:
    """Samples those rows again on the host and writes the tokens back to the device."""

    def __init__(self, slots: Slots, sampler: Sampler, structured: StructuredOutput | None, drafter: Drafter) -> None:
        self._slots = slots
        self._sampler = sampler
        self._structured = structured
        self._drafter = drafter

    def rows(self, packed: PackedStep) -> list[int]:
        """The chunks to sample on the host, as indices among those that sample."""
        needed = self._slots.on_host[packed.slots]
        if packed.num_sampled > len(packed.chunks):  # some have drafts
            needed |= np.array([self._drawn_from(chunk) is not None for chunk in packed.chunks], np.bool_)
        indices: list[int] = needed.nonzero()[0].tolist()
        return indices

    def begin_masks(self, packed: PackedStep, rows: Sequence[int]) -> MaskJob | None:
        """Start computing token masks, which goes on while the device computes the logits."""
        if self._structured is None:
            return None
        chunks = [packed.chunks[index] for index in rows]
        return self._structured.begin_masks([chunk.request for chunk in chunks], [chunk.drafts for chunk in chunks])

    def sample(
        self, packed: PackedStep, rows: Sequence[int], logits: Tensor, masks: MaskJob | None
    ) -> dict[int, SampledTokens]:
        """The tokens of these chunks, by index; also set as their last tokens on the device."""
        if not rows:
            return {}
        chunks = [packed.chunks[index] for index in rows]
        for chunk in chunks:
            self._sampler.follow(chunk.request)
        ends = np.cumsum([chunk.num_scored for chunk in packed.chunks])[rows].tolist()
        scored = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_scored, end)]
        sampled = self._sampler.sample(
            logits[sent(scored, logits.device)].float(),
            [chunk.request.id for chunk in chunks],
            [chunk.known_end - chunk.request.num_prompt for chunk in chunks],
            masks.wait() if masks else None,
            [chunk.drafts for chunk in chunks],
            [self._drawn_from(chunk) for chunk in chunks],
        )
        found, at = [], 0
        for accepted in sampled.accepted:
            kept = slice(at, at + 1 + accepted)
            found.append(SampledTokens(sampled.tokens[kept], sampled.logprobs[kept]))
            at = kept.stop
        slots = sent(packed.slots[rows].tolist(), logits.device)
        self._slots.last_token[slots] = sent([one.tokens[-1] for one in found], logits.device, torch.int32)
        return dict(zip(rows, found, strict=True))

    def _drawn_from(self, chunk: Chunk) -> Tensor | None:
        return self._drafter.sampled_from(chunk.request.id) if chunk.drafts else None

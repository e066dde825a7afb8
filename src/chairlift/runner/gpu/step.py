"""What came of a step: on the device, and as the scheduler wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from chairlift.attention.base import RaggedLayout
from chairlift.attention.input_batch import InputBatch
from chairlift.core.beam.search import Candidates
from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.plan import Chunk, StepPlan, StepResult, StepTiming
from chairlift.models.base import HiddenStates
from chairlift.runner.gpu.packing import Packed
from chairlift.runner.gpu.staging import Staging


@dataclass(frozen=True, slots=True)
class Seen:
    """What a network that guesses reads of a step, besides its tokens: it learns from what the model has computed."""

    tokens: Tensor  # [T] int32
    hidden: HiddenStates

    def batch(self, plan: StepPlan, offsets: Sequence[int], view: Mapping[str, Tensor]) -> InputBatch:
        """`offsets`: the first row of each chunk. `view`: what the device was sent of the step."""
        nothing = view["slot"][:0]
        layout = RaggedLayout(
            offsets=[*offsets, plan.num_tokens],
            starts=[chunk.start for chunk in plan.chunks],
            ends=[chunk.end for chunk in plan.chunks],
            tables=nothing[:, None],  # attention reads its own, by slot
            slots=nothing,
        )
        padding = len(self.tokens) - plan.num_tokens
        return InputBatch(self.tokens, view["position"], view["sample_row"], layout, num_padding=padding)


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """On the device; of a captured step, overwritten by the next one of its shape."""

    logits: Tensor  # [samples, vocab]
    tokens: Tensor  # [samples] int32
    seen: Seen | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the host's sampler gave one request: a token, and one more for each draft that was right."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    plan: StepPlan
    packed: Packed
    staging: Staging
    chosen: dict[int, Chosen]  # by the index of the chunk among those that sample
    candidates: dict[str, Candidates]
    build_seconds: float
    typical: bool  # whether later steps of its shape will take as long: not if it was captured, or soon will be

    def result(self) -> StepResult:
        """Wait for the step, and return its tokens."""
        self.staging.finished.synchronize()
        tokens: list[int] = self.staging.tokens[: self.packed.num_sampled].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        accepted: dict[str, int] = {}
        if self.chosen or len(tokens) > len(self.packed.chunks):
            tokens, logprobs, accepted = self._kept(tokens)
        seconds = self.staging.started.elapsed_time(self.staging.finished) * 1e-3
        timing = StepTiming(build=self.build_seconds, forward=seconds)
        return StepResult(self.plan, tokens, logprobs, timing, self.plan.idle_rows, accepted, self.candidates)

    def _kept(self, sampled: Sequence[int]) -> tuple[list[int], list[TokenLogprobs | None], dict[str, int]]:
        """The tokens that count: of each request, up to the first that differs from its guess."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        accepted: dict[str, int] = {}
        row = 0
        for index, chunk in enumerate(self.packed.chunks):
            found = self.chosen.get(index) or _verified(chunk, sampled[row : row + chunk.num_scored])
            row += chunk.num_scored
            tokens += found.tokens
            logprobs += found.logprobs
            if len(found.tokens) > 1:
                accepted[chunk.request.id] = len(found.tokens) - 1
        return tokens, logprobs, accepted


def _verified(chunk: Chunk, sampled: Sequence[int]) -> Chosen:
    """Each token was chosen as if the guesses before it were right."""
    right = 0
    while right < len(chunk.drafts) and sampled[right] == chunk.drafts[right]:
        right += 1
    return Chosen(sampled[: right + 1], [None] * (right + 1))

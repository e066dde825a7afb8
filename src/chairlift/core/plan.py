"""What one step will do, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chairlift.core.beam.search import Candidates
from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.request import Request

BAD_LOGITS = -1  # stands for a token where the model gave no usable scores


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: block `source` must be copied to `target` before the step writes anything."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """A block of a preempted request, to be copied to host memory or back."""

    request: Request
    block: int  # on the device
    slot: int  # in host memory


# Nobody changes a chunk. It is not frozen because every decode makes one, and that would take five times as long.
@dataclass(slots=True)
class Chunk:
    """The tokens [start, start + count) of one request, to be computed in this step.

    The last of them may be drafts: guesses that the request does not know yet. The step finds out how far they are
    right, and gives the request a token after the last right one.
    """

    request: Request
    start: int
    count: int
    table: Sequence[int]  # the request's block table: logical block -> physical block
    samples: bool  # whether it reaches the request's last token, so that the next one can be sampled
    copies: tuple[BlockCopy, ...] = ()
    generation: int = 0  # the request's when this was planned
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        return self.count == 1 + len(self.drafts) and self.start >= self.request.num_prompt

    @property
    def known_end(self) -> int:
        """Where its drafts begin."""
        return self.start + self.count - len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens[self.start : self.known_end], *self.drafts]

    @property
    def num_scored(self) -> int:
        """Of how many of its last tokens the scores of the next one are needed."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged batch: chunks of many requests, concatenated in this order."""

    step: int
    chunks: tuple[Chunk, ...]
    idle_rows: int = 0  # seats that a static batch keeps for finished requests: computed, and the result dropped
    swap_outs: tuple[BlockSwap, ...] = ()  # to be made first of all: others may write to these blocks in this step
    swap_ins: tuple[BlockSwap, ...] = ()  # to be made next, before the copies of the chunks

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_decode_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks if chunk.decodes)

    @property
    def num_drafts(self) -> int:
        return sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def copies(self) -> list[BlockCopy]:
        return [copy for chunk in self.chunks for copy in chunk.copies]

    def __bool__(self) -> bool:
        return bool(self.chunks)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the executor's share of a step went, in seconds."""

    build: float = 0.0  # plan -> tensors
    forward: float = 0.0  # the model
    sample: float = 0.0  # logits -> tokens

    @property
    def total(self) -> float:
        return self.build + self.forward + self.sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per chunk of the plan that samples, in the plan's order; with drafts, one more for each right one."""

    plan: StepPlan
    tokens: Sequence[int]  # BAD_LOGITS where a row could not be sampled
    logprobs: Sequence[TokenLogprobs | None]
    timing: StepTiming = StepTiming()
    padding_tokens: int = 0  # rows the model computed for nobody: idle seats, and what fills up a padded batch
    accepted: Mapping[str, int] = field(default_factory=dict)  # by request id: how many of its drafts were right
    candidates: Mapping[str, Candidates] = field(default_factory=dict)  # by request id: of beams, whose token is moot

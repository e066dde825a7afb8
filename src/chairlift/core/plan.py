"""The plan of one step and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chairlift.core.beam.search import Candidates
from chairlift.core.request import NO_POSITIONS, Request
from chairlift.core.sampling.logprobs import TokenLogprobs

BAD_LOGITS = -1  # the token of a row that could not be sampled


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy-on-write: block `source` is copied to `target` before the step writes anything."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """A block of a preempted request, to be copied to host memory or back."""

    request: Request
    block: int  # A block on the device.
    slot: int  # A slot in host memory.


NO_SLOT = -1  # no state slot: a state of zeros


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """The state slots of a chunk of a model with recurrent layers."""

    read: int  # the slot with the state after the tokens before the chunk; NO_SLOT at the beginning of a sequence
    writes: tuple[tuple[int, int], ...]  # (row of the chunk, slot that receives the state after that row)


# Immutable by convention: every decode creates one, and creating a frozen one takes five times as long.
@dataclass(slots=True)
class Chunk:
    """The tokens [start, start + count) of one request, to be computed in this step.

    The last of them may be draft tokens, which are not known tokens of the request yet. The step verifies them and
    samples one more token after the last accepted one.
    """

    request: Request
    start: int
    count: int
    table: Sequence[int]  # the request's block table: logical block -> physical block
    samples: bool  # includes the last known token, so that the next one is sampled
    copies: tuple[BlockCopy, ...] = ()
    generation: int = 0  # The request's generation at planning time.
    drafts: tuple[int, ...] = ()
    read: range = NO_POSITIONS  # prompt positions whose hidden states are needed, in addition to the sampled ones

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        return self.count == 1 + len(self.drafts) and self.start >= self.request.num_prompt

    @property
    def known_end(self) -> int:
        """The position after the last known token, where the drafts begin."""
        return self.start + self.count - len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens[self.start : self.known_end], *self.drafts]

    @property
    def num_scored(self) -> int:
        """The number of its last tokens that need logits."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged batch: chunks of many requests, concatenated in this order."""

    step: int
    chunks: tuple[Chunk, ...]
    idle_rows: int = 0  # padding rows for finished requests of a static batch
    swap_outs: tuple[BlockSwap, ...] = ()  # before everything else: this step may overwrite these blocks
    swap_ins: tuple[BlockSwap, ...] = ()  # next, before the copies of the chunks
    reads: bool = False  # whether any chunk reads prompt positions
    states: tuple[ChunkStates, ...] = ()  # one for each chunk, if the model has recurrent layers

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
    """The seconds that an executor spent on the parts of a step."""

    build: float = 0.0  # plan -> tensors
    forward: float = 0.0  # the model
    sample: float = 0.0  # logits -> tokens

    @property
    def total(self) -> float:
        return self.build + self.forward + self.sample


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """What a step computed from the prompt positions that its chunks read, by request id."""

    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)  # one for each position
    vectors: Mapping[str, Sequence[float]] = field(default_factory=dict)  # Only prompts that are complete have one.


NO_PROMPT_OUTPUTS = PromptOutputs()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One token per chunk that samples, in the plan's order, plus one for each accepted draft."""

    plan: StepPlan
    tokens: Sequence[int]  # BAD_LOGITS where a row could not be sampled
    logprobs: Sequence[TokenLogprobs | None]
    timing: StepTiming = StepTiming()
    padding_tokens: int = 0  # padding rows: idle slots, and rows that fill up a padded batch
    accepted: Mapping[str, int] = field(default_factory=dict)  # accepted drafts by request id
    candidates: Mapping[str, Candidates] = field(
        default_factory=dict
    )  # The keys are request ids; beams ignore the sampled token.
    prompts: PromptOutputs = NO_PROMPT_OUTPUTS

"""The plan of one step, while it is built and when it is sealed, its limits, and its result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from chairlift.core.encoder_cache import EncoderCache
from chairlift.core.images import NO_ENCODING, EncodePlan
from chairlift.core.request import NO_POSITIONS, Request
from chairlift.errors import InvalidParameter

NO_LIMIT = 2**31


class LimitReason(StrEnum):
    FIXED = "as configured"
    LEARNING = "twice what was measured so far: larger steps are still unknown"
    ALONE = "no running request is decoding, so none waits for this step"
    TPOT = "the most that keeps the step inside target_tpot_ms"
    FLOOR = "the decodes alone take longer than target_tpot_ms; prompts get the least that keeps them moving"
    TTFT = "the least that keeps requests without a first token inside target_ttft_ms"
    LATE = "a request will miss target_ttft_ms; this is what computes prompts fastest"
    SLACK = "the most with which running requests still meet their targets"
    SHORT = "the most with which a step takes no more than a few times as long as its decodes alone"
    KNEE = "the least that comes close to the highest speed of prompts"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of one step, set by a budget."""

    tokens: int  # all tokens of the step
    prefill_tokens: int  # the part of them that are not decodes
    slots: int = NO_LIMIT  # The limit of admission; running requests stay.
    reason: LimitReason = LimitReason.FIXED  # why `prefill_tokens` has this value
    predicted_seconds: float | None = field(default=None, compare=False)  # The time of a step at these limits.
    target_seconds: float | None = field(default=None, compare=False)  # the latency target, if any

    @classmethod
    def most(cls, max_batch_tokens: int, max_prefill_tokens: int | None = None) -> StepLimits:
        """Build the limits that the config sets."""
        if max_batch_tokens < 1:
            raise InvalidParameter("max_batch_tokens", f"must be at least 1, got {max_batch_tokens}")
        if max_prefill_tokens is not None and max_prefill_tokens < 1:
            raise InvalidParameter("max_prefill_tokens", f"must be at least 1, got {max_prefill_tokens}")
        return cls(max_batch_tokens, min(max_prefill_tokens or max_batch_tokens, max_batch_tokens))


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
    beside: tuple[Sequence[int], ...] = ()  # the request's other block tables, where layers have different ones

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
    swap_outs: tuple[BlockSwap, ...] = ()  # They come before everything else: this step may overwrite these blocks.
    swap_ins: tuple[BlockSwap, ...] = ()  # They come next, before the copies of the chunks.
    reads: bool = False  # whether any chunk reads prompt positions
    states: tuple[ChunkStates, ...] = ()  # one for each chunk, if the model has recurrent layers
    encoding: EncodePlan = NO_ENCODING  # the work on images, which precedes the chunks

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
        return bool(self.chunks or self.encoding)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model at one position, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token: one more than the number of tokens that are strictly more likely."""
    top: tuple[tuple[int, float], ...]
    """The n most likely (token id, logprob), most likely first; ties in the order of their ids."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of one beam, likeliest first, with their log-probabilities."""

    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The seconds that an executor spent on the parts of a step."""

    build: float = 0.0  # plan -> tensors
    forward: float = 0.0  # the model
    sample: float = 0.0  # logits -> tokens
    encode: float = 0.0  # images -> embeddings

    @property
    def total(self) -> float:
        return self.build + self.forward + self.sample + self.encode


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
    bad_images: Mapping[bytes, str] = field(default_factory=dict)  # why an image could not be encoded, by its key


class PlanBuilder:
    """The chunks chosen so far for the coming step, and what is left of its budget."""

    def __init__(self, limits: StepLimits, images: EncoderCache | None = None) -> None:
        """`images`: what is encoded of the images in prompts, if the model reads any."""
        self.images = images
        self.encoding = NO_ENCODING
        self.chunks: dict[str, Chunk] = {}
        self.room = limits.tokens
        self.prefill_room = min(limits.prefill_tokens, self.room)
        self.slots = limits.slots
        self.memory_was_short = False
        self.reads = False  # whether a chunk that was added reads prompt positions
        self.swap_outs: list[BlockSwap] = []
        self.swap_ins: list[BlockSwap] = []
        self._limited_tenants: Collection[str] = ()
        self._limited_room = 0

    def limit_tenants(self, tenants: Collection[str], prefill_tokens: int) -> None:
        """Limit the prompts of these tenants to `prefill_tokens` in total."""
        self._limited_tenants, self._limited_room = tenants, prefill_tokens

    def room_for(self, request: Request, most: int = NO_LIMIT) -> int:
        """The number of additional tokens, at most about `most`, that `request` may compute in this step.

        More than `most` may be needed for the tokens of an image, where these must be computed together.
        """
        room = min(self.budget_for(request), most)
        if room <= 0 or self.images is None or not request.images:
            return room
        return self.images.limit(request, request.num_planned + self.count(request), room)

    def budget_for(self, request: Request) -> int:
        """The same by the budget alone, whatever is encoded of its images."""
        room = self.room if request.decoding else self.prefill_room
        if request.tenant in self._limited_tenants and not request.decoding:
            room = min(room, self._limited_room)
        return min(self.num_behind(request), room)

    def num_behind(self, request: Request) -> int:
        """Known tokens of `request` that will not be computed after this step."""
        return request.num_behind - self.count(request)

    def count(self, request: Request) -> int:
        chunk = self.chunks.get(request.id)
        return chunk.count if chunk is not None else 0

    def add(self, request: Request, count: int, table: Sequence[int], copies: tuple[BlockCopy, ...]) -> None:
        """Add `count` tokens of `request`, after any that the plan already has."""
        self._spend(request, count)
        before = self.chunks.get(request.id)
        if before is not None:
            count, copies = before.count + count, before.copies + copies
        start = request.num_planned
        samples = start + count == request.num_expected and not request.prompt_only
        read = request.positions_to_read(start, start + count)
        self.reads = self.reads or bool(read)
        self.chunks[request.id] = Chunk(request, start, count, table, samples, copies, request.generation, read=read)

    def add_decode(self, request: Request, table: Sequence[int], copies: tuple[BlockCopy, ...]) -> None:
        """Add the next token of a decoding `request`; a fast path of `add`, since most chunks are decodes."""
        self.room -= 1
        self.prefill_room = min(self.prefill_room, self.room)
        self.chunks[request.id] = Chunk(request, request.num_planned, 1, table, True, copies, request.generation)

    def add_drafts(self, request: Request, drafts: Sequence[int]) -> None:
        """Add draft tokens to the chunk of `request`."""
        chunk = self.chunks[request.id]
        self._spend(request, len(drafts))
        chunk.count += len(drafts)  # nothing refers to the chunk before the plan is sealed
        chunk.drafts = tuple(drafts)

    def drop(self, request: Request) -> Chunk | None:
        """Remove the chunk of `request`, if any, and return its tokens to the budget."""
        chunk = self.chunks.pop(request.id, None)
        if chunk is not None:
            self._spend(request, -chunk.count)
        return chunk

    def spend_on_images(self, count: int) -> None:
        """Take the price of the work on images from the budget of prompts."""
        self.room -= count
        self.prefill_room = min(self.prefill_room - count, self.room)

    def _spend(self, request: Request, count: int) -> None:
        self.room -= count
        if not request.decoding:
            self.prefill_room -= count
            if request.tenant in self._limited_tenants:
                self._limited_room -= count
        self.prefill_room = min(self.prefill_room, self.room)

"""A request: its known tokens and the number of them that are computed, and the limits that a model sets for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum
from operator import countOf

from chairlift.core.adapters import AdapterUse
from chairlift.core.images import PromptImage
from chairlift.core.sampling.params import PoolingKind, SamplingParams
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter

NO_POSITIONS = range(0)


class Status(StrEnum):
    WAITING = "waiting"  # It is in the queue: new, or preempted.
    RUNNING = "running"  # It is in the batch, and holds a slot and KV blocks.
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request finished. `detail` is the stop token id or stop string, or the error's text."""

    reason: FinishReason
    detail: int | str | None = None
    parameter: str | None = None  # the invalid parameter, if the error is detected only after submission
    temporary: bool = False  # the same request may succeed later


class RequestGroup(ABC):
    """Requests that are admitted, preempted and finished together, such as the beams of one search."""

    members: Sequence[Request]
    leader: Request  # the member that waits in the queue

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """The number of candidates for the next token that a step returns for each member."""

    @abstractmethod
    def blocks_to_join(self, block_size: int) -> int:
        """KV blocks that the other members need for their known tokens, in addition to those of the leader."""

    @abstractmethod
    def regroup(self) -> None:
        """Return to the state before admission, after all members were preempted."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated.

    Its *known* tokens are the prompt and the generated tokens; the first `num_computed` of them have their keys and
    values in the cache. The scheduler uses only that difference: a decode is one token behind, a prefill is many
    behind, and a prefix hit starts further ahead.

    Steps may be planned before the results of earlier ones are read (on a GPU the next step is queued while one runs).
    Therefore `num_planned` counts tokens that are computed or in flight, and `num_unread` counts tokens that steps in
    flight sample: they are on the device but not read yet.

    Only the scheduler and the KV accounting change a request; other code only reads it.
    """

    id: str
    prompt_tokens: InitVar[Sequence[int]]
    params: SamplingParams
    _: KW_ONLY
    max_new_tokens: int
    arrival: float
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    salt: str = ""  # requests with different salts never share cached blocks
    leader: Request | None = None  # the sibling (n > 1) whose prompt blocks it shares
    priority: int = 0  # lower values are admitted first
    tenant: str = ""  # The unit of fair sharing.
    targets: Targets = NO_TARGETS  # counted from its arrival; missing one ends nothing, unlike a deadline
    service_class: str = ""  # the name of its targets, if they are those of a class
    adapters: tuple[AdapterUse, ...] = ()  # Its rows have these; its salt has them, too.
    images: Sequence[PromptImage] = ()  # those of its prompt, in order
    rotary_positions: object = None  # The places of its tokens, for a model that places images in two dimensions.

    order: int = field(default=-1, init=False)  # position in the order of submission, set by the scheduler
    group: RequestGroup | None = field(default=None, init=False)  # the beam search that it belongs to
    num_slots: int = field(default=1, init=False)  # A waiting leader needs those of its whole group.
    has_masks: bool = field(init=False)  # read for each request of each step
    ready: bool = field(init=False)  # a structured request is ready once its grammar is compiled
    num_prompt: int = field(init=False)
    _tokens: list[int] = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_planned: int = field(default=0, init=False)  # num_computed plus the tokens of steps in flight
    num_unread: int = field(default=0, init=False)  # tokens that steps in flight will add
    num_read: int = field(default=0, init=False)  # prompt positions that its prompt outputs have been computed from
    # The number of preemptions; results of steps planned before the last one are dropped.
    generation: int = field(default=0, init=False)
    status: Status = field(default=Status.WAITING, init=False)
    ending: Ending | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)  # when its first token was known
    steps_in_flight: int = field(default=0, init=False)  # planned steps whose results are not applied yet
    times_passed_over: int = field(default=0, init=False)  # admissions of other requests ahead of this one
    starved: bool = field(default=False, init=False)  # passed over too often: it is admitted before all others
    num_charged: int = field(default=0, init=False)  # known tokens that its tenant has been charged for
    load_generation: int = field(default=-1, init=False)  # the generation in which tiers were last asked for its blocks
    block_digests: list[bytes] = field(default_factory=list, init=False)  # those of its first full blocks, on demand

    def __post_init__(self, prompt_tokens: Sequence[int]) -> None:
        assert prompt_tokens, "an empty prompt is rejected before a request is created"
        assert self.max_new_tokens >= 0
        self._tokens, self.num_prompt = list(prompt_tokens), len(prompt_tokens)
        self.has_masks, self.ready = self.params.has_masks, self.params.structure is None

    @property
    def tokens(self) -> Sequence[int]:
        """All known tokens, prompt first."""
        return self._tokens

    @property
    def prompt(self) -> Sequence[int]:
        return self._tokens[: self.num_prompt]

    @property
    def output(self) -> Sequence[int]:
        return self._tokens[self.num_prompt :]

    @property
    def num_known(self) -> int:
        return len(self._tokens)

    @property
    def num_output(self) -> int:
        return len(self._tokens) - self.num_prompt

    @property
    def num_expected(self) -> int:
        """Known tokens plus those that steps in flight will add."""
        return len(self._tokens) + self.num_unread

    @property
    def num_behind(self) -> int:
        """Tokens still to be computed. The last token that may be generated never needs to be."""
        expected = len(self._tokens) + self.num_unread
        if self.num_unread and (self.has_masks or self.group is not None):
            return 0  # the next token depends on tokens that are not read yet
        if 0 < self.max_new_tokens <= expected - self.num_prompt:
            return 0
        return max(0, expected - self.num_planned)  # num_planned is larger while drafts are in flight

    @property
    def decoding(self) -> bool:
        """Whether it is exactly one token behind, and that token was generated."""
        planned = self.num_planned  # a hot path: no other properties are used here
        return planned == len(self._tokens) + self.num_unread - 1 and planned >= self.num_prompt

    @property
    def prompt_only(self) -> bool:
        """Whether it generates nothing and ends once its prompt is computed."""
        return self.max_new_tokens == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether it returns the log-probabilities of its prompt; of `n` completions only the first does."""
        return self.params.prompt_logprobs is not None and self.leader is None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all its prompt tokens must be computed, so that it cannot start with cached ones."""
        pooling = self.params.pooling
        if pooling is not None:
            return pooling.kind is not PoolingKind.LAST
        return self.scores_prompt and self.num_read < self.num_prompt - 1

    def positions_to_read(self, start: int, end: int) -> range:
        """The prompt positions from `start` to `end` whose hidden states its prompt outputs are computed from."""
        pooling = self.params.pooling
        if pooling is not None:
            return range(max(start, self.num_prompt - 1) if pooling.kind is PoolingKind.LAST else start, end)
        if self.scores_prompt:  # each position scores the token after it; after the last one, a token is sampled
            return range(max(start, self.num_read), min(end, self.num_prompt - 1))
        return NO_POSITIONS

    def start_from(self, num_computed: int) -> None:
        """Set the number of tokens in the cache, with no step in flight."""
        self.num_computed = self.num_planned = num_computed
        self.num_unread = 0

    def rewind(self) -> None:
        """Discard planned tokens that are not computed (rejected drafts), with no step in flight."""
        self.num_planned = self.num_computed

    @property
    def companions(self) -> Sequence[Request]:
        """The requests that are preempted and finished together with this one, itself included."""
        return (self,) if self.group is None else self.group.members

    @property
    def least_new_tokens(self) -> int:
        """The fewest tokens that it will still generate."""
        params = self.params
        may_stop = bool(params.stop_ids or params.stop_strings) or not params.ignore_eos
        certain = params.min_tokens if may_stop else self.max_new_tokens
        return max(1, certain - self.num_output)

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def continue_from(self, other: Request) -> None:
        """Replace its tokens by those of another beam of the same search."""
        self._tokens = list(other._tokens)
        self.block_digests = list(other.block_digests)
        self.num_charged = other.num_charged
        self.generation += 1  # its block table is replaced

    def clear_output(self) -> None:
        """Remove all generated tokens; a beam search appends the final ones when it ends."""
        del self._tokens[self.num_prompt :]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset(self.params.stop_ids).union(() if self.params.ignore_eos else self.eos_ids)

    def ending_after(self, token: int) -> Ending | None:
        """The ending caused by the token just appended, if any. Stop strings are checked by the text layer."""
        if token in self.params.stop_ids:
            return Ending(FinishReason.STOP, token)
        if token in self.eos_ids and not self.params.ignore_eos:
            return Ending(FinishReason.STOP)
        if len(self._tokens) - self.num_prompt >= self.max_new_tokens:
            return Ending(FinishReason.LENGTH)
        return None

    def __repr__(self) -> str:
        progress = f"{self.num_computed}/{self.num_known} computed"
        return f"Request({self.id!r}, {self.status}, prompt {self.num_prompt}, {progress})"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of a model as plain numbers, for use in other processes too."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and output together

    def check_lengths(self, num_prompt: int, max_tokens: int | None, parameter: str, *, prompt_only: bool) -> None:
        """Raise if a prompt, or a prompt and the `max_tokens` of output that were asked for, exceed the context."""
        self.check_prompt_length(num_prompt, parameter, prompt_only=prompt_only)
        if max_tokens is not None:
            self.check_total_length(num_prompt, max_tokens)

    def check_prompt_length(self, num_tokens: int, parameter: str = "prompt", *, prompt_only: bool = False) -> None:
        """Raise if a prompt of `num_tokens` is empty or leaves no room for output, if there is to be any."""
        if num_tokens < 1:
            raise InvalidParameter(parameter, "is empty; give at least one token")
        if num_tokens >= self.max_model_len + prompt_only:
            most = "fit" if prompt_only else "leave room for an answer"
            problem = f"has {num_tokens} tokens, but at most {self.max_model_len - 1 + prompt_only} {most}"
            raise self._exceeded(parameter, problem)

    def check_total_length(self, num_prompt: int, max_tokens: int, parameter: str = "max_tokens") -> None:
        """Raise if a prompt and `max_tokens` of output exceed the context."""
        if num_prompt + max_tokens > self.max_model_len:
            problem = f"{max_tokens} is too large for a prompt of {num_prompt} tokens"
            raise self._exceeded(parameter, f"{problem}; lower it, or leave it out to use what is left")

    def check_params(self, params: SamplingParams) -> None:
        """Raise if sampling parameters, which are valid by themselves, name tokens that the model does not have."""
        self.check_tokens("stop_token_ids", params.stop_ids)
        self.check_tokens("logit_bias", list(params.logit_bias or ()))

    def check_tokens(self, parameter: str, tokens: Sequence[int]) -> None:
        """Raise if one of them is no token id. Prompts are long, so a Python loop only looks for the one to name."""
        if not len(tokens):
            return
        # Subclasses of int, such as bool, are checked one by one.
        if countOf(map(type, tokens), int) == len(tokens) and min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidParameter(parameter, f"token ids must be integers, got {token!r}")
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter(parameter, f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def _exceeded(self, parameter: str, problem: str) -> InvalidParameter:
        # Clients look for this phrase of OpenAI's in the message.
        context = f"this model's maximum context length is {self.max_model_len} tokens"
        return InvalidParameter(parameter, f"{problem} ({context})", CONTEXT_LENGTH_EXCEEDED)

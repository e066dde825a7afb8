"""The events of the engine: one stream of typed values for outputs, metrics, the dashboard and the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.core.kv.prefix_index import Miss
from chairlift.core.plan import StepLimits, StepPlan, StepTiming, TokenLogprobs
from chairlift.core.request import Ending


def completion_ids(request_id: str, n: int) -> list[str]:
    """The ids of the `n` completions of one prompt; the first is the prompt's own id."""
    return [request_id, *(f"{request_id}#{index}" for index in range(1, n))]


@dataclass(frozen=True, slots=True)
class RequestQueued:
    time: float
    request_id: str
    num_prompt: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request left the queue with `cached_tokens` tokens from the prefix cache; `miss` is why there are not more."""

    time: float
    request_id: str
    cached_tokens: int
    miss: Miss | None
    swapped_tokens: int = 0  # tokens restored from host memory


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A running request lost its blocks and slot to another and waits again."""

    time: float
    request_id: str
    computed_tokens: int
    swapped: bool = False  # its blocks are in host memory; otherwise its tokens are recomputed


@dataclass(slots=True)  # It is not frozen: creating a frozen one takes longer, and there is one per token.
class TokenProduced:
    time: float
    request_id: str
    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The log-probabilities of the next prompt tokens; the first event of a request begins with its second token."""

    time: float
    request_id: str
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PromptPooled:
    """The vector of a request's whole prompt."""

    time: float
    request_id: str
    vector: Sequence[float]


@dataclass(frozen=True, slots=True)
class DraftsVerified:
    """A step verified `proposed` draft tokens of a request; the first `accepted` of them were accepted."""

    time: float
    request_id: str
    proposed: int
    accepted: int


@dataclass(slots=True)  # Made for every token, as TokenProduced is.
class TextProduced:
    """Text that can be streamed: whole characters, and no part of a possible stop string."""

    time: float
    request_id: str
    text: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    time: float
    request_id: str
    ending: Ending
    logprob: float | None = None  # The sum over the completion, if completions were ranked.
    score: float | None = None  # the score they were ranked by


@dataclass(frozen=True, slots=True)
class BudgetDecided:
    """The limits of a step differ from those of the step before."""

    time: float
    limits: StepLimits


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step finished. Times are in seconds."""

    time: float
    step: int
    decode_tokens: int
    prefill_tokens: int
    requests: int
    waiting: int
    used_blocks: int  # held while the step ran
    total_blocks: int
    schedule_seconds: float
    apply_seconds: float
    timing: StepTiming
    padding_tokens: int = 0  # padding rows
    seconds: float = 0.0  # The time from its start, or the later end of the step before, to its end.
    predicted_seconds: float | None = None  # The cost model's prediction; None before it has observed a step.
    speedup: float | None = None  # estimated speedup from speculation; None without it
    plan: StepPlan | None = field(default=None, repr=False, compare=False)


Event = (
    RequestQueued
    | RequestAdmitted
    | RequestPreempted
    | PromptScored
    | PromptPooled
    | TokenProduced
    | DraftsVerified
    | TextProduced
    | RequestFinished
    | BudgetDecided
    | StepDone
)

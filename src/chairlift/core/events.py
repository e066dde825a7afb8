"""Everything that happens, as typed values in one stream, for outputs, metrics, the dashboard and the tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.core.kv.prefix_index import Miss
from chairlift.core.plan import StepPlan, StepTiming
from chairlift.core.request import Ending
from chairlift.core.sampling.logprobs import TokenLogprobs
from chairlift.core.step_limits import StepLimits


@dataclass(frozen=True, slots=True)
class RequestQueued:
    time: float
    request_id: str
    num_prompt: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request left the queue: how many tokens it need not compute, and why not more."""

    time: float
    request_id: str
    cached_tokens: int
    miss: Miss | None
    swapped_tokens: int = 0  # tokens restored from host memory


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """Memory ran out, or another request took the slot: the request lost its blocks and waits again."""

    time: float
    request_id: str
    computed_tokens: int
    swapped: bool = False  # its blocks are in host memory; else its tokens are recomputed


@dataclass(slots=True)  # immutable by convention: freezing would make every token slower
class TokenProduced:
    time: float
    request_id: str
    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class DraftsVerified:
    """A step verified `proposed` draft tokens of a request; the first `accepted` of them were right."""

    time: float
    request_id: str
    proposed: int
    accepted: int


@dataclass(slots=True)  # as TokenProduced
class TextProduced:
    """Text that is safe to show: whole characters, and no part of a stop string."""

    time: float
    request_id: str
    text: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    time: float
    request_id: str
    ending: Ending
    logprob: float | None = None  # of all its tokens, if completions were compared: beam search or best_of
    score: float | None = None  # by which they were compared


@dataclass(frozen=True, slots=True)
class BudgetDecided:
    """The limits of a step differ from those before. `limits` has the reason and the predicted time."""

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
    seconds: float = 0.0  # from its beginning, or the end of the step before it if that was later, to its end
    predicted_seconds: float | None = None  # by the cost model; None before it has seen any step
    speedup: float | None = None  # by speculation, estimated from the last steps; None without it
    plan: StepPlan | None = field(default=None, repr=False, compare=False)  # what it computed


Event = (
    RequestQueued
    | RequestAdmitted
    | RequestPreempted
    | TokenProduced
    | DraftsVerified
    | TextProduced
    | RequestFinished
    | BudgetDecided
    | StepDone
)

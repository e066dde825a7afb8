"""Everything that happens, as typed values in one stream.

Outputs, metrics, the dashboard and the tests read these and never reach into the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.core.kv.prefix_index import Miss
from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.plan import StepPlan, StepTiming
from chairlift.core.request import Ending
from chairlift.core.step_limits import StepLimits


@dataclass(frozen=True, slots=True)
class RequestQueued:
    time: float
    request_id: str
    num_prompt: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """It left the queue: the tokens it need not compute, and why there were not more of them."""

    time: float
    request_id: str
    cached_tokens: int
    miss: Miss | None
    swapped_tokens: int = 0  # those it gets back from host memory


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """Memory ran out, or its seat was due to another: its blocks were taken and it went back to the queue."""

    time: float
    request_id: str
    computed_tokens: int
    swapped: bool = False  # to host memory; else those tokens are computed again


@dataclass(slots=True)  # nobody changes one; not frozen because every token makes one, and that would take far longer
class TokenProduced:
    time: float
    request_id: str
    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class DraftsVerified:
    """A step computed `proposed` guesses of a request's next tokens; the first `accepted` of them were right."""

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
    logprob: float | None = None  # of all its tokens together, if completions were compared: beam search or best_of
    score: float | None = None  # by which they were


@dataclass(frozen=True, slots=True)
class BudgetDecided:
    """From this step on, other limits hold than before. `limits` says why, and what time the step should take."""

    time: float
    limits: StepLimits


@dataclass(frozen=True, slots=True)
class StepDone:
    """What one step carried. Times are seconds."""

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
    padding_tokens: int = 0  # computed besides, for nobody
    seconds: float = 0.0  # from its beginning, or the end of the step before it if that was later, to its end
    predicted_seconds: float | None = None  # what the cost model expected; None while it knows nothing
    speedup: float | None = None  # by speculation, estimated from the last steps; None without it
    plan: StepPlan | None = field(default=None, repr=False, compare=False)  # whose tokens it computed


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

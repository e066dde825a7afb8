"""Messages between the front end and the engine process: msgpack over a private Unix socket."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from chairlift.core.kv.state_slots import StateUsage
from chairlift.core.kv.tiers import TierUsage
from chairlift.core.plan import TokenLogprobs
from chairlift.core.request import RequestLimits
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.targets import NO_TARGETS, Targets

# ---- to the engine -----------------------------------------------------------------------------------------------


class ImageInput(msgspec.Struct, frozen=True):
    """An image of a prompt, prepared for the encoder."""

    digest: bytes
    spans: list[tuple[int, int]]
    work: int
    whole: bool
    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]  # (type, shape, numbers) by name


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Generate `params.n` completions of one prompt; their ids are `request_id`, `request_id#1`, …"""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    timeout: float | None
    cache_salt: str
    priority: int = 0
    tenant: str = ""
    targets: Targets = NO_TARGETS
    service_class: str = ""
    images: list[ImageInput] = []
    lora: dict[str, float] | None = None  # adapters and their weights


class Cancel(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Finish the step in flight and exit."""


class RecordSteps(msgspec.Struct, tag=True, frozen=True):
    """Send dashboard frames for the next `seconds`."""

    seconds: float
    keyframe: bool = False  # start with a keyframe, for a page that is new or lost frames


class SwitchPolicy(msgspec.Struct, tag=True, frozen=True):
    policy: str
    max_delay_ms: float | None = None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Register an adapter, in place of the one of this name."""

    request_id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    name: str


# ---- from the engine ---------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, tag=True, frozen=True):
    """The engine is starting: how much of a stage is done."""

    stage: str
    done: int
    total: int


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The engine is ready."""

    limits: RequestLimits
    max_batch_requests: int
    total_blocks: int = 0  # Those of the KV cache.
    start_seconds: dict[str, float] = {}  # The key is the phase of the start; they are in order.
    described: str = ""  # the format of the weights and the device
    endpoint: str = ""  # the one of OpenAI's API that suits the model best


class FailedToLoad(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start, and a retry would not help."""

    problem: str
    parameter: str | None = None  # the engine option that is the reason


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The engine refuses a request, permanently or temporarily."""

    request_id: str
    parameter: str | None  # None if the request is valid and may be retried
    problem: str


class Update(msgspec.Struct):
    """The output that one step added to one completion."""

    request_id: str
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []  # Those of `tokens`, if requested.
    prompt_logprobs: list[TokenLogprobs] = []  # Those of further prompt tokens, if requested.
    vector: bytes = b""  # float32, of the whole prompt; with pooling
    cached_tokens: int | None = None  # set at every admission, also after a preemption
    admitted: float | None = None  # time of the admission, on the monotonic clock that all processes share
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # Only beam search and best_of have it.


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """The outcome of one step: updates for clients, and numbers for the metrics."""

    updates: list[Update]
    running: int  # They are counted after the step.
    waiting: int
    used_blocks: int
    total_blocks: int
    preemptions: int
    states: StateUsage | None = None  # Those of recurrent layers, if there are any.
    requests: int = 0  # The number in the step; 0 if only endings are reported.
    decode_tokens: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0
    part_seconds: dict[str, float] = {}  # By part; overlapping steps may sum to more than `seconds`.
    wait_reasons: dict[str, int] = {}  # waiting requests by reason
    lookups: dict[str, int] = {}  # prefix cache lookups by result
    predicted_seconds: float | None = None
    verifications: int = 0  # requests with draft tokens
    proposed_at: list[int] = []  # draft tokens by position
    accepted_at: list[int] = []  # accepted draft tokens by position
    speedup: float | None = None  # estimated speedup of speculation
    prefill_limit: int | None = None  # prompt tokens that the budget allows, if it changed
    limit_reason: str = ""  # reason of the change
    adapters: AdapterTotals | None = None  # if the engine has any
    tiers: list[TierUsage] = []  # behind the prefix cache


class AdapterChanged(msgspec.Struct, tag=True, frozen=True):
    """The answer to `LoadAdapter` and `UnloadAdapter`."""

    request_id: str
    problem: str | None = None
    parameter: str | None = None


class AdapterTotals(msgspec.Struct, frozen=True):
    """The adapters of an engine, since its start."""

    registered: int
    in_memory: int
    num_bytes: int
    loads: int
    evictions: int
    tokens: dict[str, int]  # generated with each adapter that is in memory


class DashboardFrame(msgspec.Struct, tag=True, frozen=True):
    """A frame of the dashboard's recording."""

    json: bytes  # the message for the page
    is_key: bool
    tenants: dict[int, str]  # names of tenant numbers not sent before


class RecorderFault(msgspec.Struct, tag=True, frozen=True):
    """The dashboard's recorder failed. It starts again, unless it failed too often."""

    is_off: bool


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Sent by a separate thread, so that a long step does not look like a dead engine."""

    turn_seconds: float  # age of the loop's current iteration, which runs at most one step


EngineCommand = RecordSteps | SwitchPolicy | LoadAdapter | UnloadAdapter  # They are about no request.
ToEngine = Submit | Cancel | Shutdown | EngineCommand
FromEngine = (
    Loading | Loaded | FailedToLoad | Refused | StepReport | AdapterChanged | DashboardFrame | RecorderFault | Heartbeat
)

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode

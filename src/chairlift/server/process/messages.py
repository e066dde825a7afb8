"""What the front end and the engine process say to each other, as msgpack over a private Unix socket."""

from __future__ import annotations

from typing import Any

import msgspec

from chairlift.core.logprobs import TokenLogprobs
from chairlift.core.sampling_params import SamplingParams


class Submit(msgspec.Struct, tag=True, frozen=True):
    """`params.n` completions of one prompt; they answer as `request_id`, `request_id#1`, …"""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    timeout: float | None
    cache_salt: str
    priority: int = 0
    tenant: str = ""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Finish the step under way and exit."""


class Watch(msgspec.Struct, tag=True, frozen=True):
    """Somebody looks at the dashboard: send frames for so many seconds from now on."""

    seconds: float
    keyframe: bool = False  # someone is new, or has missed frames: begin with all there is to know


class SwitchPolicy(msgspec.Struct, tag=True, frozen=True):
    policy: str
    max_delay_ms: float | None = None


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The engine is up."""

    max_model_len: int
    vocab_size: int
    max_batch_requests: int


class FailedToLoad(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start, and trying again would not help."""

    problem: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request that the engine cannot answer as it is, or cannot answer just now."""

    request_id: str
    parameter: str | None  # None if nothing is wrong with it: it may be sent again
    problem: str


class Update(msgspec.Struct):
    """What one step added to one completion."""

    request_id: str
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []  # of the tokens, if they were asked for
    cached_tokens: int | None = None  # said whenever it boards: again after a preemption
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # by which beam search or best_of chose it


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """All that happened in one step: what goes to clients, and what goes into the metrics."""

    updates: list[Update]
    waiting: int
    used_blocks: int
    total_blocks: int
    preemptions: int
    requests: int = 0  # 0 if there was nothing to compute, only endings to tell
    decode_tokens: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0
    part_seconds: dict[str, float] = {}  # where they went; parts of steps that overlap may be more than the whole
    wait_reasons: dict[str, int] = {}  # how many wait for what
    lookups: dict[str, int] = {}  # in the prefix cache, by what ended them
    predicted_seconds: float | None = None
    verifications: int = 0  # requests that had drafts
    proposed_at: list[int] = []  # how many drafts there were in the first place, the second, …
    accepted_at: list[int] = []  # and how many of those were right
    speedup: float | None = None  # by speculation, estimated
    prefill_limit: int | None = None  # prompt tokens that the budget allows, when that changes ...
    limit_reason: str = ""  # ... and why


class Frame(msgspec.Struct, tag=True, frozen=True):
    """A piece of the record that the dashboard draws."""

    json: bytes  # as it goes to the page
    is_key: bool
    tenants: dict[int, str]  # what the numbers in it stand for, as far as that was not told yet


class RecorderFault(msgspec.Struct, tag=True, frozen=True):
    """What records the steps for the dashboard has failed. It begins anew, unless it failed too often."""

    is_off: bool


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Sent by a thread of its own, so that a long step does not look like a dead engine."""

    turn_seconds: float  # how long the engine's loop has been at its present turn, which is at most one step


ToEngine = Submit | Cancel | Stop | Watch | SwitchPolicy
FromEngine = Loaded | FailedToLoad | Refused | StepReport | Frame | RecorderFault | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    message: FromEngine = _from_engine.decode(data)
    return message

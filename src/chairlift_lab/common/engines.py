"""Engines around one loaded model, workloads on them, and the figures that follow from the times of tokens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import sub
from typing import TYPE_CHECKING, Any

from chairlift.config import EngineConfig
from chairlift.core.events import Event, RequestAdmitted, RequestFinished, RequestPreempted, StepDone, TokenProduced
from chairlift.core.plan import Chunk
from chairlift.core.request import FinishReason, Request
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.progress import Note
from chairlift_lab.common.workload import BenchRequest, Workload, full_length

if TYPE_CHECKING:
    from chairlift.attention.storage import KVStorage
    from chairlift.engine.engine import Engine
    from chairlift.engine.memory_plan import MemoryPlan
    from chairlift.engine.startup import LoadedModel, StartedEngine
    from chairlift.terminal.options import EngineOptions


def touch_cache(storage: KVStorage, num_blocks: int | None = None) -> None:
    """Write to the first blocks of the KV cache.

    The system allocates pages on first write; this moves that cost out of the first measured request.
    """
    import torch

    for side in (*storage.keys, *storage.values):
        side[:num_blocks].view(torch.uint8).zero_()


def whole_chunk(memory: MemoryPlan, request: Request, *, samples: bool) -> Chunk:
    """All known tokens of `request` as one chunk, in the first blocks of an empty cache."""
    count = request.num_known
    kv = memory.make_cache(prefix_caching=False, step_tokens=count)
    kv.attach(request, kv.match(request))
    if kv.reserve(request, count) is None:
        room = f"the KV cache has room for {memory.longest:,} tokens of one sequence"
        raise InvalidParameter("kv_memory", f"{room}, and {count:,} are to be computed at once")
    return Chunk(request, 0, count, kv.table(request), samples=samples, beside=kv.tables_beside(request))


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """Builds engines around a loaded model; `options` are fields of `EngineConfig`, which each engine may change."""

    loaded: LoadedModel
    options: Mapping[str, Any]

    @classmethod
    def load(cls, model: str, options: Mapping[str, Any], *, progress: bool = False) -> EngineMaker:
        from chairlift.engine.startup import load_model

        return cls(load_model(model, EngineConfig(**options), progress=progress), options)

    @classmethod
    def from_options(cls, engine: EngineOptions, note: Note, **changes: Any) -> EngineMaker:
        """Load the model that the options of a command name."""
        note(f"loading {engine.model}")
        return cls.load(engine.model, engine.config() | changes, progress=not engine.quiet)

    def start(self, *, clock: Callable[[], float] = time.monotonic, **changes: Any) -> StartedEngine:
        """Start an engine; `changes` override `options`."""
        from chairlift.engine.startup import start_engine

        return start_engine(self.loaded, self.config(**changes), clock=clock)

    def engine(self, *, clock: Callable[[], float] = time.monotonic, **changes: Any) -> Engine:
        return self.start(clock=clock, **changes).engine

    def config(self, **changes: Any) -> EngineConfig:
        return EngineConfig(**(dict(self.options) | changes))

    def kv_memory(self, num_blocks: int) -> int:
        """The size of `num_blocks` blocks in bytes."""
        from chairlift.engine.memory_plan import bytes_per_token
        from chairlift.engine.settings import kv_dtype

        model, config = self.loaded.model, self.config()
        return num_blocks * config.block_size * bytes_per_token(model.attention_layers, kv_dtype(config, model))

    def vocabulary(self) -> list[int]:
        """All token ids but the special ones."""
        special = self.loaded.tokenizer.special_ids
        return [token for token in range(self.loaded.model.vocab_size) if token not in special]

    def num_parameters(self) -> int:
        """The number of weights, from the checkpoint's config."""
        from chairlift.engine.settings import resolve_machine
        from chairlift.loading.checkpoint import open_checkpoint
        from chairlift.loading.resolve import resolve_model
        from chairlift.models import describe
        from chairlift.models.dummy import DummyCheckpoint

        name, config = self.loaded.name, self.config()
        if config.load_format == "dummy":
            return describe(DummyCheckpoint(name, resolve_machine(config).device).config).num_parameters
        return describe(open_checkpoint(resolve_model(name)).config).num_parameters

    def settings(self) -> dict[str, Any]:
        """The settings that all engines share, for a report."""
        from chairlift.engine.settings import kv_dtype, resolve_machine

        config = self.config()
        settings = resolve_machine(config)
        return {
            "model": self.loaded.name,
            "device": str(settings.device),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "quantization": self.loaded.model.quantization,
            "kv_dtype": str(kv_dtype(config, self.loaded.model)).removeprefix("torch."),
            "threads": settings.threads,
            "block_size": config.block_size,
            "max_batch_tokens": settings.max_batch_tokens,
        }


TokenProgress = Callable[[int], None]
"""Called with the number of tokens generated so far; with 0 when the clock starts."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures from inside an engine, which peers do not have."""

    steps: int
    mean_batch_requests: float
    scheduler_share: float  # share of step time outside the model and the sampler
    preemptions: int
    peak_kv_blocks: int
    peak_batch_requests: int
    useful_token_share: float  # share of the computed tokens that are not padding
    cached_tokens: int  # prompt tokens found in the prefix cache

    @classmethod
    def of(cls, events: Sequence[Event]) -> EngineFigures:
        steps = [event for event in events if isinstance(event, StepDone)]
        # Only the first admission counts: later a request finds its own blocks.
        cached = {event.request_id: event for event in reversed(events) if isinstance(event, RequestAdmitted)}
        scheduling = sum(step.schedule_seconds + step.apply_seconds for step in steps)
        building = sum(step.timing.build for step in steps)
        running = sum(step.timing.total for step in steps)
        useful = sum(step.decode_tokens + step.prefill_tokens for step in steps)
        return cls(
            steps=len(steps),
            mean_batch_requests=sum(step.requests for step in steps) / len(steps),
            scheduler_share=(scheduling + building) / (scheduling + running),
            preemptions=sum(isinstance(event, RequestPreempted) for event in events),
            peak_kv_blocks=max(step.used_blocks for step in steps),
            peak_batch_requests=max(step.requests for step in steps),
            useful_token_share=useful / (useful + sum(step.padding_tokens for step in steps)),
            cached_tokens=sum(event.cached_tokens for event in cached.values()),
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a workload. Times are seconds since its start."""

    seconds: float
    input_tokens: int
    token_times: Sequence[Sequence[float]]  # When each token of each request arrived.
    inside: EngineFigures | None = None
    arrivals: Sequence[float] | None = None  # When each request arrived; None: all at the start.
    steps: Sequence[StepDone] = ()

    @property
    def firsts(self) -> list[float]:
        return [times[0] for times in self.token_times]

    @property
    def lasts(self) -> list[float]:
        return [times[-1] for times in self.token_times]

    def row(self, name: str) -> dict[str, Any]:
        """The figures, with the keys of docs/bench-json.md."""
        output_tokens = sum(len(times) for times in self.token_times)
        arrivals = self.arrivals or [0.0] * len(self.token_times)
        first, whole = (list(map(sub, times, arrivals)) for times in (self.firsts, self.lasts))
        gaps = [later - earlier for times in self.token_times for earlier, later in pairwise(times)]
        return {
            "name": name,
            "output_tokens_per_s": output_tokens / self.seconds,
            "total_tokens_per_s": (self.input_tokens + output_tokens) / self.seconds,
            "seconds": self.seconds,
            "output_tokens": output_tokens,
            "input_tokens": self.input_tokens,
            "requests": len(self.token_times),
            "ttft_p50_ms": percentile(first, 50) * 1e3,
            "ttft_p95_ms": percentile(first, 95) * 1e3,
            "latency_p50_ms": percentile(whole, 50) * 1e3,
            "latency_p99_ms": percentile(whole, 99) * 1e3,
            "itl_mean_ms": sum(gaps) / len(gaps) * 1e3 if gaps else None,
            "itl_p99_ms": percentile(gaps, 99) * 1e3 if gaps else None,
            **(dict.fromkeys(EngineFigures.__slots__) if self.inside is None else asdict(self.inside)),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, interpolated linearly."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def add_speedups(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row the ratios of its output tokens/s to those of the others."""
    for row in rows:
        row["speedup_vs"] = {
            other["name"]: row["output_tokens_per_s"] / other["output_tokens_per_s"]
            for other in rows
            if other is not row
        }


@dataclass(frozen=True, slots=True)
class Session:
    """Requests sent one after the other: each prompt is the whole conversation so far plus the turn's `prompt_ids`."""

    turns: tuple[BenchRequest, ...]
    targets: Targets = NO_TARGETS  # Each of its requests has them.

    @property
    def longest(self) -> int:
        return sum(len(turn.prompt_ids) + turn.n_out for turn in self.turns)


def serve_at_once(engine: Engine, prompts: Iterable[Sequence[int]], outputs: Iterable[int]) -> Measurement:
    """Send all requests at once, each for exactly this number of tokens, and run the engine until it has no work."""
    requests = [(prompt, full_length(count)) for prompt, count in zip(prompts, outputs, strict=True)]
    steps: list[StepDone] = []
    start_time = time.perf_counter()
    token_times: dict[str, list[float]] = {engine.submit(prompt, params)[0]: [] for prompt, params in requests}
    engine.expect_no_more()
    while engine.has_work:
        events, now = engine.step(), time.perf_counter() - start_time
        for event in events:
            if isinstance(event, StepDone):
                steps.append(event)
            elif isinstance(event, TokenProduced) and event.request_id in token_times:
                token_times[event.request_id].append(now)
    seconds = time.perf_counter() - start_time
    engine.check_alive()
    num_input = sum(len(prompt) for prompt, _ in requests)
    return Measurement(seconds, num_input, list(token_times.values()), steps=steps)


def measure_engine(
    engine: Engine,
    workload: Workload,
    advance: TokenProgress,
    arrivals: Sequence[float] | None = None,
    in_flight: int | None = None,
) -> Measurement:
    """Run all requests, after a short warm-up.

    They arrive at once or at the times of `arrivals` (seconds, rising). `in_flight` limits the number of requests in
    flight: the next is sent when one has finished.
    """
    run_sessions(engine, _single_turns(workload.warm_up()))
    return run_sessions(engine, _single_turns(workload), advance, arrivals, in_flight)


def _single_turns(workload: Workload) -> list[Session]:
    return [Session((request,)) for request in workload.requests]


@dataclass(slots=True)
class _Turn:
    """A request of a session; times are seconds since the start of the run."""

    session: Session
    index: int
    prompt: list[int]
    came: float
    answer: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        return self.index + 1 == len(self.session.turns)


def run_sessions(
    engine: Engine,
    sessions: Sequence[Session],
    advance: TokenProgress = lambda tokens: None,
    arrivals: Sequence[float] | None = None,
    in_flight: int | None = None,
) -> Measurement:
    """Run every session to its end. A request that arrives during a step waits for its end, which counts."""
    longest = max(session.longest for session in sessions)
    if longest > engine.max_model_len:
        problem = f"a request of {longest} tokens, prompt and output, exceeds the {engine.max_model_len}"
        raise InvalidParameter("max_model_len", f"{problem} of this model; use shorter lengths")
    coming = deque(zip(arrivals or [0.0] * len(sessions), sessions, strict=True))
    most = in_flight or len(sessions)
    turns: list[_Turn] = []
    unfinished: dict[str, _Turn] = {}
    events: list[Event] = []  # all but those of tokens

    def submit(session: Session, index: int, said: Sequence[int], came: float) -> None:
        prompt = [*said, *session.turns[index].prompt_ids]
        (request_id,) = engine.submit(prompt, full_length(session.turns[index].n_out), targets=session.targets)
        unfinished[request_id] = _Turn(session, index, prompt, came)
        turns.append(unfinished[request_id])

    advance(0)
    start_time = engine.now()
    while coming or unfinished:
        while coming and coming[0][0] <= engine.now() - start_time and len(unfinished) < most:
            came, session = coming.popleft()
            submit(session, 0, [], engine.now() - start_time if most < len(sessions) else came)
        if not coming and all(turn.is_last for turn in unfinished.values()):
            engine.expect_no_more()
        until_next = coming[0][0] - (engine.now() - start_time) if coming else math.inf
        time.sleep(max(0.0, min(engine.pause(), until_next)))
        for event in engine.step():
            if isinstance(event, TokenProduced):
                unfinished[event.request_id].answer.append(event.token)
                unfinished[event.request_id].token_times.append(event.time - start_time)
                continue
            events.append(event)
            if isinstance(event, RequestFinished):
                if event.ending.reason is not FinishReason.LENGTH:
                    raise EngineDead(f"a request ended early: {event.ending.reason} {event.ending.detail or ''}")
                turn = unfinished.pop(event.request_id)
                if not turn.is_last:
                    submit(turn.session, turn.index + 1, turn.prompt + turn.answer, event.time - start_time)
        engine.check_alive()
        advance(sum(len(turn.answer) for turn in turns))
    return Measurement(
        seconds=engine.now() - start_time,
        input_tokens=sum(len(turn.prompt) for turn in turns),
        token_times=[turn.token_times for turn in turns],
        inside=EngineFigures.of(events),
        arrivals=[turn.came for turn in turns],
    )

"""Profiles of decode steps at fixed batch sizes, and their trace for Perfetto."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chairlift.attention.storage import bytes_per_number
from chairlift.config import EngineConfig
from chairlift.core.events import RequestFinished, StepDone
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.settings import resolve_machine
from chairlift.engine.startup import StartedEngine
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.common.floor import Ceilings, KernelWork, ceilings_for, step_work, total

WARM_UP_STEPS = 3  # decode steps of a batch before the measured ones
ENGINE_TRACK = 1


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    batches: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 128
    steps: int = 32  # measured steps per batch
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise InvalidParameter("batch", f"needs numbers of at least 1, got {list(self.batches)}")
        for name in ("prompt_tokens", "steps"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, got {getattr(self, name)}")

    def with_slots(self, config: EngineConfig) -> EngineConfig:
        """Set `max_batch_requests` to the largest batch, unless it is given."""
        most = max(self.batches)
        if config.max_batch_requests is not None:
            return config
        settings = resolve_machine(config)
        if most <= settings.max_batch_requests:
            return config
        if most > settings.max_batch_tokens:
            problem = f"{most} requests need a token each, but max_batch_tokens is {settings.max_batch_tokens}"
            raise InvalidParameter("batch", problem)
        return replace(config, max_batch_requests=most)

    def check(self, engine: Engine, prefill_tokens: int) -> None:
        """Raise if the engine cannot hold the largest batch with `prefill_tokens` per step."""
        slots, most = engine.scheduler.max_batch_requests, max(self.batches)
        if most > slots:
            raise InvalidParameter("batch", f"{most} requests do not fit in the {slots} slots; set max_batch_requests")
        kv = engine.scheduler.kv
        # Requests with a computed prompt generate a token in each step that the others' prompts take.
        waiting = -(-most * self.prompt_tokens // prefill_tokens)
        tokens = self.prompt_tokens + waiting + self.steps + 2 * WARM_UP_STEPS + 2
        if tokens > engine.max_model_len:
            problem = (
                f"with --batch {most} and --steps {self.steps} a request has up to {tokens} tokens, "
                f"but at most {engine.max_model_len} fit"
            )
            raise InvalidParameter("prompt_tokens", problem)
        needed = most * -(-tokens // kv.block_size)
        if needed > kv.num_blocks:
            raise InvalidParameter("batch", f"{most} requests need {needed} KV blocks, there are {kv.num_blocks}")


@dataclass(frozen=True, slots=True)
class PartTime:
    """Mean time of one part of a step."""

    name: str
    seconds: float
    work: KernelWork | None = None  # None: not counted

    @property
    def flops_per_second(self) -> float | None:
        return self.work.flops / self.seconds if self.work and self.work.flops and self.seconds else None

    @property
    def bytes_per_second(self) -> float | None:
        return self.work.bytes / self.seconds if self.work and self.work.bytes and self.seconds else None

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "seconds": self.seconds}
        row |= {name: getattr(self.work, name, None) for name in ("flops", "bytes")}
        return row | {name: getattr(self, name) for name in ("flops_per_second", "bytes_per_second")}


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Profile of the decode steps of one batch size; the parts add up to the step."""

    batch: int
    context: float  # mean context length
    steps: int
    step_seconds: float
    parts: Sequence[PartTime]
    pieces: Mapping[str, float] = field(default_factory=dict)  # seconds of the finest timed phases
    more: Mapping[str, float | None] = field(default_factory=dict)

    def share(self, name: str) -> float:
        return sum(part.seconds for part in self.parts if part.name == name) / self.step_seconds

    def row(self) -> dict[str, Any]:
        return {
            "name": f"batch {self.batch}",
            "batch": self.batch,
            "context": self.context,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "parts": [part.row() | {"share": part.seconds / self.step_seconds} for part in self.parts],
            "pieces": dict(self.pieces),
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step's summary event and when it ran."""

    done: StepDone
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Batch:
    """Requests that decode together without end."""

    engine: Engine
    size: int
    prompt_tokens: int
    rng: random.Random
    ids: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Compute the prompts and some warm-up steps."""
        # Without end: requests with a computed prompt decode while the others' prompts are computed.
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None, detokenize=False)
        for _ in range(self.size):
            prompt = [self.rng.randrange(self.engine.vocab_size) for _ in range(self.prompt_tokens)]
            self.ids += self.engine.submit(prompt, params)
        self.engine.expect_no_more()
        decoded = 0
        while decoded < WARM_UP_STEPS:
            step = self.step()
            decoded += step is not None and step.done.decode_tokens == self.size

    def step(self) -> TimedStep | None:
        """Run one step; None if it reports nothing, as the first one of an executor that works ahead."""
        begin = time.perf_counter()
        events = self.engine.step()
        end = time.perf_counter()
        self.engine.check_alive()
        if any(isinstance(event, RequestFinished) for event in events):
            raise InvalidParameter("prompt_tokens", f"a request was full before all {self.size} could decode together")
        done = next((event for event in events if isinstance(event, StepDone)), None)
        return None if done is None else TimedStep(done, begin, end)

    def run(self, steps: int) -> Iterator[TimedStep]:
        for _ in range(steps):
            step = self.step()
            if step is None or step.done.decode_tokens != self.size or step.done.prefill_tokens:
                raise InvalidParameter("batch", f"the engine does not keep {self.size} requests in one step")
            yield step

    def end(self) -> None:
        for request_id in self.ids:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()


def mean_work(started: StartedEngine, steps: Sequence[TimedStep]) -> dict[str, KernelWork]:
    dtype, layers = started.runner.storage.keys[0].dtype, started.runner.model.attention_layers
    itemsize = bytes_per_number(layers[0].head_dim, dtype) if layers else 0.0
    each = [step_work(started.runner.model, itemsize, step.done.plan) for step in steps if step.done.plan is not None]
    return {name: total(work[name] for work in each) / len(each) for name in each[0]}


def mean_context(steps: Sequence[TimedStep]) -> float:
    ends = [chunk.end for step in steps if step.done.plan is not None for chunk in step.done.plan.chunks]
    return sum(ends) / len(ends)


# ---- the trace ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval, in seconds of the monotonic clock."""

    name: str
    part: str
    begin: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def trace_events(spans: Iterable[Span], track: str, number: int = ENGINE_TRACK) -> list[dict[str, Any]]:
    """Slices of one track; nested ones are shown below their parents."""
    common: dict[str, Any] = {"pid": 0, "tid": number}
    names = {"process_name": "chairlift", "thread_name": track}
    events = [common | {"name": name, "ph": "M", "args": {"name": value}} for name, value in names.items()]
    for span in spans:
        times = {"ts": span.begin * 1e6, "dur": span.seconds * 1e6}
        events.append(common | times | {"name": span.name, "cat": span.part, "ph": "X", "args": dict(span.details)})
    return events


def write_trace(path: Path, events: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    try:
        text = json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms", "metadata": dict(about)})
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("out", f"cannot write {str(path)!r} ({error.strerror})") from None


# ---- the profile ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profiled:
    batches: list[BatchProfile]
    ceilings: Ceilings
    trace: list[dict[str, Any]]


def profile_engine(
    started: StartedEngine, settings: ProfileSettings, prefill_tokens: int, note: Note = lambda text: None
) -> Profiled:
    """Profile every batch size; `prefill_tokens` is the largest number of prompt tokens of a step."""
    settings.check(started.engine, prefill_tokens)
    note("measuring what the machine can do")
    ceilings = ceilings_for(started.runner.model)
    if started.runner.model.device.type == "cuda":
        from chairlift_lab.profile.gpu import profile_on_gpu

        batches, trace = profile_on_gpu(started, settings, note)
    else:
        from chairlift_lab.profile.cpu import profile_on_cpu

        batches, trace = profile_on_cpu(started, settings, note)
    return Profiled(batches, ceilings, trace)

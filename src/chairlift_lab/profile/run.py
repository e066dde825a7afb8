"""`chairlift profile`: the profile of every batch size, the ceilings of the machine, and the trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.engine.startup import StartedEngine
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.common.floor import Ceilings, ceilings_for
from chairlift_lab.profile.step_profile import BatchProfile, ProfileSettings

ENGINE_TRACK = 1


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
    process = {"ph": "M", "pid": 0, "tid": number}
    named = [
        process | {"name": "process_name", "args": {"name": "chairlift"}},
        process | {"name": "thread_name", "args": {"name": track}},
    ]
    return named + [
        {
            "name": span.name,
            "cat": span.part,
            "ph": "X",
            "pid": 0,
            "tid": number,
            "ts": span.begin * 1e6,
            "dur": span.seconds * 1e6,
            "args": dict(span.details),
        }
        for span in spans
    ]


def write_trace(path: Path, events: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    try:
        text = json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms", "metadata": dict(about)})
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("out", f"cannot write {str(path)!r} ({error.strerror})") from None


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

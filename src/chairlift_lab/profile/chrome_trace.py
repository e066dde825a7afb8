"""Chrome trace files, which ui.perfetto.dev and Chrome open: one JSON object per slice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter

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

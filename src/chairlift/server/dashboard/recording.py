"""Files of recorded runs: dashboard frames as compressed lines of JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import InvalidParameter
from chairlift.server.dashboard.page import dashboard_page

SUFFIXES = (".lift", ".html")


@dataclass(frozen=True, slots=True)
class RunSummary:
    steps: int
    requests: int
    seconds: float
    lost: int  # frames dropped because the client read too slowly
    has_keyframe: bool  # without one, nothing can be drawn

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> RunSummary:
        steps, lost, has_keyframe, requests, times = 0, 0, False, set[str](), list[float]()
        for line in lines:
            frame = json.loads(line)
            steps += len(frame.get("steps", ()))
            requests.update(given[1] for given in (*frame.get("new", ()), *frame.get("requests", ())))
            has_keyframe |= frame["t"] == "key"
            if "now" in frame:
                times.append(frame["now"])
            if frame["t"] == "lost":
                lost = frame["frames"]
        return cls(steps, len(requests), times[-1] - times[0] if times else 0.0, lost, has_keyframe)


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise InvalidParameter("out", f"must end in {' or '.join(SUFFIXES)}, got {path.name!r}")


def write_run(path: Path, lines: Sequence[bytes]) -> None:
    """Write a `.lift` file, which the page can open, or an `.html` file, which is the page with the run embedded."""
    check_suffix(path)
    data = compress(lines)
    if path.suffix == ".html":
        path.write_text(dashboard_page(data), encoding="utf-8")
    else:
        path.write_bytes(data)


def compress(lines: Sequence[bytes]) -> bytes:
    return gzip.compress(b"".join(line + b"\n" for line in lines), mtime=0)

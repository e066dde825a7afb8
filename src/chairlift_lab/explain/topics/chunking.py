"""A long prompt among running requests: read at once, and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chairlift.core.events import TokenProduced
from chairlift_lab.explain.drawing import Panel, Sheet
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import CPU_TIME, Run, TimedRequest, TopicEngines

LONG, CHUNK = 150, 20
NAMES = {"whole": "the prompt at once", "chunked": f"the prompt in chunks of at most {CHUNK} tokens"}


@dataclass(frozen=True, slots=True)
class ChunkingData:
    long: str  # the request with the long prompt
    runs: dict[str, Run]


def run(engines: TopicEngines) -> ChunkingData:
    short = [TimedRequest(name, engines.prompt(6, skip=7 * index), 18) for index, name in enumerate("ABC")]
    requests = [*short, TimedRequest("D", engines.prompt(LONG, skip=1), 5, turn=4)]
    runs = {
        name: engines.record(
            requests,
            max_batch_tokens=256,
            max_batch_requests=8,
            max_prefill_tokens=most,
            prefix_caching=False,
            clock=CPU_TIME,
        )
        for name, most in (("whole", None), ("chunked", CHUNK))
    }
    return ChunkingData("D", runs)


def longest_gap(data: ChunkingData, name: str) -> float:
    """Seconds between two tokens of a request that was already answering, at most."""
    times: dict[str, list[float]] = {}
    for event in data.runs[name].events:
        if isinstance(event, TokenProduced) and event.request_id != data.long:
            times.setdefault(event.request_id, []).append(event.time)
    return max(b - a for moments in times.values() for a, b in pairwise(moments))


def first_token(data: ChunkingData, name: str) -> float:
    """Seconds from the coming of the long prompt to its first token."""
    run = data.runs[name]
    came = next(event.time for event in run.queued() if event.request_id == data.long)
    tokens = (event for event in run.events if isinstance(event, TokenProduced) and event.request_id == data.long)
    return next(tokens).time - came


def draw(data: ChunkingData) -> Sheet:
    sheet = Sheet(f"A prompt of {LONG} tokens comes while three others are answered", size=(11.5, 6.4))
    grid = sheet.grid(2, 1)
    total = max(sum(step.seconds for step in run.done()) for run in data.runs.values())
    for row, (name, run) in enumerate(data.runs.items()):
        panel = sheet.panel(name, grid[row, 0])
        panel.title(NAMES[name], f"longest pause between two tokens: {1e3 * longest_gap(data, name):.0f} ms")
        _draw_run(panel, data, run, 1e3 * total)
    sheet.legend({"decode": "one more token of an answer", "prefill": "a piece of a prompt (number: tokens)"})
    return sheet


def _draw_run(panel: Panel, data: ChunkingData, run: Run, total: float) -> None:
    """Each step as wide as the time it took."""
    names = [request.name for request in run.requests]
    begin = 0.0
    for step, done in zip(run.steps, run.done(), strict=True):
        width = 1e3 * done.seconds
        for chunk in step.chunks:
            label = "" if chunk.decode or width <= 0.018 * total else str(chunk.count)
            panel.bar(begin, names.index(chunk.request), width, chunk.kind, label)
        begin += width
    panel.axes.set_xlim(-0.005 * total, 1.01 * total)
    panel.axes.set_ylim(len(names) + 0.1, -0.1)
    panel.chart("milliseconds", "")
    panel.axes.grid(visible=False)
    panel.row_names([f"{name} (long)" if name == data.long else name for name in names], size=9)


def figures(data: ChunkingData) -> dict[str, Any]:
    sizes = data.runs["chunked"].prompt_chunks(data.long)
    figures: dict[str, Any] = {name: 1e3 * longest_gap(data, name) for name in data.runs}
    figures |= {f"first_{name}": 1e3 * first_token(data, name) for name in data.runs}
    return figures | {"long": LONG, "chunk": CHUNK, "pieces": sizes, "sizes": " + ".join(map(str, sizes))}


TOPIC = Topic("chunking", run, {"chunking": draw}, figures)

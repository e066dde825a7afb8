"""A long prompt among running requests: read at once, and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chairlift.core.events import TokenProduced
from chairlift_lab.explain.palette import Theme
from chairlift_lab.explain.recording import Run, TimedRequest
from chairlift_lab.explain.sheet import Panel, Sheet
from chairlift_lab.explain.topic import Picture, Topic
from chairlift_lab.explain.topic_engines import CPU_TIME, TopicEngines

LONG, CHUNK = 150, 20
NAMES = {"whole": "the prompt at once", "chunked": f"the prompt in chunks of at most {CHUNK} tokens"}


@dataclass(frozen=True, slots=True)
class ChunkingData:
    long: str  # the request with the long prompt
    runs: dict[str, Run]


def run(engines: TopicEngines) -> ChunkingData:
    short = [TimedRequest(name, engines.prompt(6, skip=7 * index), 18) for index, name in enumerate("ABC")]
    requests = [*short, TimedRequest("D", engines.prompt(LONG, skip=1), 5, turn=4)]
    options: dict[str, Any] = {
        "max_batch_tokens": 256,
        "max_batch_requests": 8,
        "prefix_caching": False,
        "clock": CPU_TIME,
    }
    return ChunkingData(
        "D",
        {
            "whole": engines.record(requests, **options),
            "chunked": engines.record(requests, **options, max_prefill_tokens=CHUNK),
        },
    )


def longest_gap(data: ChunkingData, name: str) -> float:
    """Seconds between two tokens of a request that was already answering, at most."""
    times: dict[str, list[float]] = {}
    for event in data.runs[name].events:
        if isinstance(event, TokenProduced) and event.request_id != data.long:
            times.setdefault(event.request_id, []).append(event.time)
    return max(b - a for found in times.values() for a, b in pairwise(found))


def first_token(data: ChunkingData, name: str) -> float:
    """Seconds from the coming of the long prompt to its first token."""
    run = data.runs[name]
    came = next(event.time for event in run.queued() if event.request_id == data.long)
    tokens = (event for event in run.events if isinstance(event, TokenProduced) and event.request_id == data.long)
    return next(tokens).time - came


def pieces(data: ChunkingData, name: str) -> list[int]:
    """How many tokens of the long prompt each step read."""
    chunks = (chunk for step in data.runs[name].steps for chunk in step.chunks)
    return [chunk.count for chunk in chunks if chunk.request == data.long and not chunk.decode]


def draw(data: ChunkingData, theme: Theme) -> Sheet:
    sheet = Sheet(theme, f"A prompt of {LONG} tokens comes while three others are answered", size=(11.5, 6.4))
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
            y = names.index(chunk.request)
            kind = "decode" if chunk.decode else "prefill"
            label = str(chunk.count) if kind == "prefill" and width > 0.018 * total else ""
            panel.bar(begin, y, width, kind, label)
        begin += width
    panel.axes.set_xlim(-0.005 * total, 1.01 * total)
    panel.axes.set_ylim(len(names) + 0.1, -0.1)
    panel.chart("milliseconds", "")
    panel.axes.grid(visible=False)
    panel.row_names([f"{name} (long)" if name == data.long else name for name in names], size=9)


def says(data: ChunkingData) -> str:
    whole, chunked = (1e3 * longest_gap(data, name) for name in data.runs)
    return (
        f"The steps of four requests over time. At once, those that were answering pause for up to {whole:.0f} ms; "
        f"with the long prompt in {len(pieces(data, 'chunked'))} chunks, for up to {chunked:.0f} ms."
    )


def teach(data: ChunkingData) -> str:
    whole, chunked = (1e3 * longest_gap(data, name) for name in data.runs)
    sizes = " + ".join(map(str, pieces(data, "chunked")))
    return f"""
Reading a long prompt takes a long step, and **every** running request waits for the whole step. A person who watches an
answer appear sees it freeze because a stranger sent a long document.

[[chunking]]

Time runs to the right, as it was measured (the processor's time, with one thread); each box is one
request's part of one step. A, B and C are being answered when D comes with {LONG} tokens.

- **At once** (above): one step reads all of D's prompt. The others wait for it: the longest pause between two of their
  tokens is {whole:.0f} ms.
- **In chunks** (below, `--max-prefill-tokens {CHUNK}`): the prompt is read as {sizes}
  tokens, over {len(pieces(data, "chunked"))} steps, and every one of these steps also carries a token for
  A, B and C. Their longest pause is {chunked:.0f} ms.

It is a trade: D, which now shares its steps, has its first token after {1e3 * first_token(data, "chunked"):.0f} ms
instead of {1e3 * first_token(data, "whole"):.0f}. What a good size is depends on the
machine and on how long a pause may be: the engine can choose it by itself (see *The cost model and the chosen chunk*).
"""


TOPIC = Topic(
    name="chunking",
    title="Chunked prefill",
    question="How can a long prompt be read without stopping all other requests?",
    run=run,
    pictures=(Picture("chunking", draw, says),),
    teach=teach,
    code=("chairlift/core/scheduler/packing.py", "chairlift/core/budgets/base.py"),
)

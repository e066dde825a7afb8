"""Static, dynamic and continuous batching of the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift_lab.explain.palette import Theme
from chairlift_lab.explain.recording import Run, TimedRequest
from chairlift_lab.explain.sheet import Panel, Sheet
from chairlift_lab.explain.timeline import SlotTimeline, timeline
from chairlift_lab.explain.topic import Picture, Topic
from chairlift_lab.explain.topic_engines import TopicEngines

SLOTS = 4
# Prompt tokens, new tokens, and the turn at which each request comes.
REQUESTS = ((6, 5, 0), (3, 14, 0), (9, 3, 1), (4, 8, 3), (7, 4, 4), (3, 11, 6), (5, 3, 8), (8, 6, 10))
WAYS: dict[str, dict[str, Any]] = {
    "static": {"policy": "static", "attention": "padded"},
    "dynamic": {"policy": "dynamic", "max_delay_ms": 0, "attention": "padded"},
    "continuous": {"policy": "continuous", "attention": "ragged"},
}
EXPLAINED = {
    "static": "waits until all slots are taken, then admits nothing until the last one is done",
    "dynamic": "starts with the requests that wait, then admits nothing until the last one is done",
    "continuous": "at every step, finished requests leave and waiting ones are admitted",
}


@dataclass(frozen=True, slots=True)
class BatchingData:
    arrivals: dict[str, int]
    runs: dict[str, Run]
    timelines: dict[str, SlotTimeline]


def run(engines: TopicEngines) -> BatchingData:
    requests = [
        TimedRequest(chr(ord("A") + index), engines.prompt(prompt, skip=3 * index), new, turn)
        for index, (prompt, new, turn) in enumerate(REQUESTS)
    ]
    runs = {
        name: engines.record(requests, max_batch_requests=SLOTS, max_batch_tokens=64, prefix_caching=False, **options)
        for name, options in WAYS.items()
    }
    return BatchingData(
        {request.name: request.turn for request in requests}, runs, {name: timeline(one) for name, one in runs.items()}
    )


def draw(data: BatchingData, theme: Theme) -> Sheet:
    sheet = Sheet(theme, "The same eight requests, three ways to batch them", size=(11, 8.6))
    turns = max(one.turns for one in data.timelines.values())
    most = max(
        map(sum, (pair for one in data.timelines.values() for pair in zip(one.useful, one.padding, strict=True)))
    )
    grid = sheet.grid(6, 1, height_ratios=[4, 1.3] * 3)
    for index, (name, line) in enumerate(data.timelines.items()):
        slots = sheet.panel(name, grid[2 * index, 0])
        _draw_slots(slots, name, line, turns, data.arrivals)
        _draw_tokens(sheet.panel(f"{name} tokens", grid[2 * index + 1, 0]), line, turns, most)
    sheet.legend(
        {
            "prefill": "reads a prompt (number: tokens)",
            "decode": "makes one token",
            "idle": "bubble: done, but keeps its slot",
            "blocked": "bubble: empty while a request waits",
            "empty": "empty, no request waits",
            "useful": "tokens of requests",
            "padding": "padding tokens",
        }
    )
    return sheet


def _draw_slots(panel: Panel, name: str, line: SlotTimeline, turns: int, arrivals: dict[str, int]) -> None:
    panel.title(
        f"{name}: {EXPLAINED[name]}",
        f"{line.turns} steps, {line.bubbles} bubbles, {sum(line.padding)} padding",
    )
    for cell in line.cells:
        labels = {"prefill": f"{cell.request}{cell.count}", "decode": cell.request}
        panel.cell(cell.turn, cell.slot, cell.kind, labels.get(cell.kind, ""))
    panel.grid_only(turns, line.slots, equal=False)
    panel.row_names([f"slot {slot + 1}" for slot in range(line.slots)])
    coming = {turn: [who for who, at in arrivals.items() if at == turn] for turn in sorted(set(arrivals.values()))}
    panel.axes.set_xticks([turn + 0.5 for turn in coming], [f"↑ {''.join(who)}" for who in coming.values()])
    panel.text(-0.25, line.slots + 0.5, "comes", color=panel.theme.muted, ha="right")


def _draw_tokens(panel: Panel, line: SlotTimeline, turns: int, most: int) -> None:
    """Columns of tokens, useful ones below."""
    theme = panel.theme
    useful, padding = theme.look("useful"), theme.look("padding")
    for turn, (some, rest) in enumerate(zip(line.useful, line.padding, strict=True)):
        panel.drawn["useful"] += some
        panel.drawn["padding"] += rest
        panel.axes.bar(turn + 0.5, some, 0.86, color=useful.fill)
        panel.axes.bar(
            turn + 0.5, rest, 0.86, bottom=some, color=padding.fill, hatch=padding.hatch, edgecolor=padding.edge, lw=0
        )
    panel.chart("", "tokens")
    panel.axes.set_xlim(-0.1, turns + 0.1)
    panel.axes.set_ylim(0, 1.05 * most)
    panel.axes.set_xticks([])


def says(data: BatchingData) -> str:
    parts = [
        f"{name}: {line.turns} steps, {line.bubbles} bubbles, {sum(line.padding)} padding tokens"
        for name, line in data.timelines.items()
    ]
    return f"Slots over time for the same {len(data.arrivals)} requests. {'; '.join(parts)}."


def teach(data: BatchingData) -> str:
    static, dynamic, continuous = (data.timelines[name] for name in ("static", "dynamic", "continuous"))
    wait = max(continuous.finished[name] - turn for name, turn in data.arrivals.items())
    static_wait = max(static.finished[name] - turn for name, turn in data.arrivals.items())
    return f"""
A model can work on many requests at once, and one step for four of them takes hardly longer than one step for one. So
requests share a step: that is **batching**. The question is which requests may join, and when.

[[batching]]

Each row is a slot, each column is one step of the model. The arrows under the slots show when a request arrives.
The small bars below count tokens: those of requests, and padding.

## Static: wait for a full car

Like a cable car. Nothing happens until all {static.slots} slots are taken. Then all ride together, and a request that
is done early keeps its slot until the longest one is done. Such a slot is a **bubble**: the model computes a row for
it, and the result is thrown away (striped). So is a slot that stays empty while a request waits (dotted). Here:
{static.bubbles} bubbles in {static.turns} steps.

Prompts have different lengths, but this batch is a rectangle, so that short prompts are filled up with **padding**:
{sum(static.padding)} padding tokens, against {sum(static.useful)} useful ones.

## Dynamic: do not wait for company

The car leaves as soon as a request is there (or after a short delay, `--max-delay-ms`). The first request waits less,
but the slots stay blocked in the same way: {dynamic.bubbles} bubbles in {dynamic.turns} steps.

## Continuous: the lift never stops

After **every** step, finished requests leave and waiting ones are admitted. The batch is not a rectangle but a plain
list of tokens, so that there is nothing to fill up: {sum(continuous.padding)} padding tokens. The same work takes
{continuous.turns} steps instead of {static.turns}, and the slowest request has its last token {wait} steps after it
came instead of {static_wait}. There are {continuous.bubbles} bubbles: a slot is empty only where no request waits.
"""


TOPIC = Topic(
    name="batching",
    title="Static, dynamic and continuous batching",
    question="Why does a server that never waits for a full batch answer all requests sooner?",
    run=run,
    pictures=(Picture("batching", draw, says),),
    teach=teach,
    code=(
        "chairlift/core/policies/base.py",
        "chairlift/core/scheduler/scheduler.py",
        "chairlift/attention/backends/padded.py",
    ),
)

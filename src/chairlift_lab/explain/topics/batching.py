"""Static, dynamic and continuous batching of the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift_lab.explain.drawing import MUTED, Panel, Sheet
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, TopicEngines

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
BUBBLES = ("idle", "blocked")


@dataclass(frozen=True, slots=True)
class SlotCell:
    """One slot in one turn: prefill, decode, idle (its request is done, its batch is not), blocked (empty while a
    request waits) or empty (no request waits)."""

    turn: int
    slot: int
    kind: str
    request: str = ""
    count: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class SlotTimeline:
    slots: int
    turns: int
    cells: tuple[SlotCell, ...]  # one for every slot and turn
    finished: dict[str, int]  # request -> turn of its last token
    useful: tuple[int, ...]  # tokens of requests, by turn
    padding: tuple[int, ...]  # padding tokens, by turn

    @property
    def bubbles(self) -> int:
        """Slots, over all turns, that computed nothing useful while they kept a request waiting or cost a row."""
        return sum(cell.kind in BUBBLES for cell in self.cells)

    @property
    def summary(self) -> str:
        return f"{self.turns} steps, {self.bubbles} bubbles, {sum(self.padding)} padding"


@dataclass(frozen=True, slots=True)
class BatchingData:
    arrivals: dict[str, int]
    runs: dict[str, Run]
    timelines: dict[str, SlotTimeline]


def run(engines: TopicEngines) -> BatchingData:
    requests = engines.requests(REQUESTS, skip=3)
    runs = {
        name: engines.record(requests, max_batch_requests=SLOTS, max_batch_tokens=64, prefix_caching=False, **options)
        for name, options in WAYS.items()
    }
    return BatchingData(
        {request.name: request.turn for request in requests}, runs, {name: timeline(run) for name, run in runs.items()}
    )


def timeline(run: Run) -> SlotTimeline:
    """Assign each request the first free slot until the engine releases it."""
    slot_of: dict[str, int] = {}
    cells: list[SlotCell] = []
    finished: dict[str, int] = {}
    useful, padding = [0] * run.turns, [0] * run.turns
    steps = {step.turn: step for step in run.steps}
    first = {chunk.request: step.turn for step in reversed(run.steps) for chunk in step.chunks}
    for turn in range(run.turns):
        step = steps.get(turn)
        chunks = {chunk.request: chunk for chunk in step.chunks} if step else {}
        present = {*chunks, *step.idle} if step else set()
        slot_of = {name: slot for name, slot in slot_of.items() if name in present}
        for name in chunks:
            if name not in slot_of:
                slot_of[name] = min(set(range(run.slots)) - set(slot_of.values()))
        request_waits = any(request.turn <= turn < first[request.name] for request in run.requests)
        owners = {slot: name for name, slot in slot_of.items()}
        for slot in range(run.slots):
            name = owners.get(slot, "")
            if not name:
                cells.append(SlotCell(turn, slot, "blocked" if request_waits else "empty"))
            elif name not in chunks:
                cells.append(SlotCell(turn, slot, "idle", name))
            else:
                cells.append(SlotCell(turn, slot, chunks[name].kind, name, chunks[name].count))
                finished[name] = turn
        useful[turn] = sum(chunk.count for chunk in chunks.values())
        padding[turn] = step.padding if step else 0
    return SlotTimeline(run.slots, run.turns, tuple(cells), finished, tuple(useful), tuple(padding))


def draw(data: BatchingData) -> Sheet:
    sheet = Sheet("The same eight requests, three ways to batch them", size=(11, 8.6))
    turns = max(line.turns for line in data.timelines.values())
    most = max(sum(pair) for line in data.timelines.values() for pair in zip(line.useful, line.padding, strict=True))
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
    panel.title(f"{name}: {EXPLAINED[name]}", line.summary)
    for cell in line.cells:
        labels = {"prefill": f"{cell.request}{cell.count}", "decode": cell.request}
        panel.cell(cell.turn, cell.slot, cell.kind, labels.get(cell.kind, ""))
    panel.grid_only(turns, line.slots, equal=False)
    panel.row_names([f"slot {slot + 1}" for slot in range(line.slots)])
    coming: dict[int, str] = {}
    for name, turn in sorted(arrivals.items(), key=lambda item: item[1]):
        coming[turn] = coming.get(turn, "↑ ") + name
    panel.axes.set_xticks([turn + 0.5 for turn in coming], list(coming.values()))
    panel.text(-0.25, line.slots + 0.5, "comes", color=MUTED, ha="right")


def _draw_tokens(panel: Panel, line: SlotTimeline, turns: int, most: int) -> None:
    """Columns of tokens, useful ones below."""
    for turn, (useful, padding) in enumerate(zip(line.useful, line.padding, strict=True)):
        panel.column(turn + 0.5, {"useful": useful, "padding": padding}, width=0.86)
    panel.chart("", "tokens")
    panel.axes.set_xlim(-0.1, turns + 0.1)
    panel.axes.set_ylim(0, 1.05 * most)
    panel.axes.set_xticks([])


def figures(data: BatchingData) -> dict[str, Any]:
    waits = {
        way: max(line.finished[name] - turn for name, turn in data.arrivals.items())
        for way, line in data.timelines.items()
    }
    summary = "; ".join(f"{way}: {line.summary} tokens" for way, line in data.timelines.items())
    return {**data.timelines, "waits": waits, "summary": summary}


TOPIC = Topic("batching", run, {"batching": draw}, figures)

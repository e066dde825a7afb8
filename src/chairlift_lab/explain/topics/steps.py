"""Which tokens share a step: the token budget, three ways of batching, and a long prompt in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chairlift.core.events import TokenProduced
from chairlift_lab.explain.drawing import MUTED, Panel, Sheet
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import CPU_TIME, Run, TimedRequest, TopicEngines

BUDGET = 16
# Prompt tokens, new tokens, and the turn at which each request comes.
BUDGET_REQUESTS = ((5, 15, 0), (7, 13, 0), (30, 6, 2), (22, 8, 3), (9, 7, 6), (24, 5, 7), (10, 4, 9))


@dataclass(frozen=True, slots=True)
class BudgetData:
    budget: int
    run: Run

    @property
    def full_steps(self) -> int:
        return sum(sum(chunk.count for chunk in step.chunks) == self.budget for step in self.run.steps)


class Budget(Topic):
    """The token budget of a step: decodes first, then prompts in chunks."""

    def run(self, engines: TopicEngines) -> BudgetData:
        requests = engines.requests(BUDGET_REQUESTS, skip=4)
        played = engines.record(requests, max_batch_tokens=BUDGET, max_batch_requests=8, prefix_caching=False)
        return BudgetData(BUDGET, played)

    def draw(self, data: BudgetData) -> Sheet:
        sheet = Sheet("budget", data=data)
        panel = sheet.panel("steps")
        for step in data.run.steps:
            tokens = [(chunk.kind, chunk.request) for chunk in step.chunks for _ in range(chunk.count)]
            tokens += [("empty", "")] * (data.budget - len(tokens))
            for height, (kind, request) in enumerate(tokens, start=1):
                panel.cell(step.turn, data.budget - height, kind, request)
        panel.grid_only(data.run.turns, data.budget, equal=False)
        counts = (1, 4, 8, 12, 16)
        panel.axes.set_yticks([data.budget - count + 0.5 for count in counts], [str(count) for count in counts])
        panel.axis_names("step", "tokens of the step")
        panel.column_names([str(step + 1) for step in range(data.run.turns)])
        return sheet

    def figures(self, data: BudgetData) -> dict[str, Any]:
        longest = max(data.run.requests, key=lambda request: len(request.prompt))
        pieces = " + ".join(map(str, data.run.prompt_chunks(longest.name)))
        return {"longest": longest, "pieces": pieces, "full_steps": data.full_steps}


# ---- batching -------------------------------------------------------------------------------------------------------

SLOTS = 4
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

    @classmethod
    def of(cls, run: Run) -> SlotTimeline:
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
                if name in chunks:
                    cells.append(SlotCell(turn, slot, chunks[name].kind, name, chunks[name].count))
                    finished[name] = turn
                else:
                    kind = "idle" if name else "blocked" if request_waits else "empty"
                    cells.append(SlotCell(turn, slot, kind, name))
            useful[turn] = sum(chunk.count for chunk in chunks.values())
            padding[turn] = step.padding if step else 0
        return cls(run.slots, run.turns, tuple(cells), finished, tuple(useful), tuple(padding))

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


class Batching(Topic):
    """Static, dynamic and continuous batching of the same requests."""

    def run(self, engines: TopicEngines) -> BatchingData:
        requests = engines.requests(REQUESTS, skip=3)
        common: dict[str, Any] = {"max_batch_requests": SLOTS, "max_batch_tokens": 64, "prefix_caching": False}
        runs = {name: engines.record(requests, **common, **options) for name, options in WAYS.items()}
        arrivals = {request.name: request.turn for request in requests}
        return BatchingData(arrivals, runs, {name: SlotTimeline.of(run) for name, run in runs.items()})

    def draw(self, data: BatchingData) -> Sheet:
        sheet, lines = Sheet("batching"), data.timelines
        turns = max(line.turns for line in lines.values())
        most = max(sum(pair) for line in lines.values() for pair in zip(line.useful, line.padding, strict=True))
        grid = sheet.grid(6, 1, height_ratios=[4, 1.3] * 3)
        for index, (name, line) in enumerate(lines.items()):
            slots = sheet.panel(name, grid[2 * index, 0])
            slots.title(f"{name}: {EXPLAINED[name]}", line.summary)
            _draw_slots(slots, line, turns, data.arrivals)
            _draw_tokens(sheet.panel(f"{name} tokens", grid[2 * index + 1, 0]), line, turns, most)
        return sheet

    def figures(self, data: BatchingData) -> dict[str, Any]:
        waits = {
            way: max(line.finished[name] - turn for name, turn in data.arrivals.items())
            for way, line in data.timelines.items()
        }
        summary = "; ".join(f"{way}: {line.summary} tokens" for way, line in data.timelines.items())
        return {**data.timelines, "waits": waits, "summary": summary}


def _draw_slots(panel: Panel, line: SlotTimeline, turns: int, arrivals: dict[str, int]) -> None:
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


# ---- chunks of a long prompt ----------------------------------------------------------------------------------------

LONG, CHUNK = 150, 20
PLANS = {"whole": "the prompt at once", "chunked": f"the prompt in chunks of at most {CHUNK} tokens"}


@dataclass(frozen=True, slots=True)
class ChunkingData:
    long: str  # the request with the long prompt
    runs: dict[str, Run]

    def longest_gap(self, name: str) -> float:
        """Seconds between two tokens of a request that was already answering, at most."""
        times: dict[str, list[float]] = {}
        for event in self.runs[name].events:
            if isinstance(event, TokenProduced) and event.request_id != self.long:
                times.setdefault(event.request_id, []).append(event.time)
        return max(b - a for moments in times.values() for a, b in pairwise(moments))

    def first_token(self, name: str) -> float:
        """Seconds from the coming of the long prompt to its first token."""
        run = self.runs[name]
        came = next(event.time for event in run.queued() if event.request_id == self.long)
        tokens = (event for event in run.events if isinstance(event, TokenProduced) and event.request_id == self.long)
        return next(tokens).time - came


class Chunking(Topic):
    """A long prompt among running requests: read at once, and in chunks."""

    def run(self, engines: TopicEngines) -> ChunkingData:
        short = [TimedRequest(name, engines.prompt(6, skip=7 * index), 18) for index, name in enumerate("ABC")]
        requests = [*short, TimedRequest("D", engines.prompt(LONG, skip=1), 5, turn=4)]
        common: dict[str, Any] = {"max_batch_tokens": 256, "max_batch_requests": 8, "prefix_caching": False}
        runs = {
            name: engines.record(requests, max_prefill_tokens=most, clock=CPU_TIME, **common)
            for name, most in (("whole", None), ("chunked", CHUNK))
        }
        return ChunkingData("D", runs)

    def draw(self, data: ChunkingData) -> Sheet:
        sheet = Sheet("chunking", long=LONG)
        grid = sheet.grid(2, 1)
        total = max(sum(step.seconds for step in run.done()) for run in data.runs.values())
        for row, (name, run) in enumerate(data.runs.items()):
            panel = sheet.panel(name, grid[row, 0])
            panel.title(PLANS[name], f"longest pause between two tokens: {1e3 * data.longest_gap(name):.0f} ms")
            _draw_run(panel, data.long, run, 1e3 * total)
        return sheet

    def figures(self, data: ChunkingData) -> dict[str, Any]:
        sizes = data.runs["chunked"].prompt_chunks(data.long)
        figures: dict[str, Any] = {name: 1e3 * data.longest_gap(name) for name in data.runs}
        figures |= {f"first_{name}": 1e3 * data.first_token(name) for name in data.runs}
        return figures | {"long": LONG, "chunk": CHUNK, "pieces": sizes, "sizes": " + ".join(map(str, sizes))}


def _draw_run(panel: Panel, long: str, run: Run, total: float) -> None:
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
    panel.row_names([f"{name} (long)" if name == long else name for name in names], size=9)

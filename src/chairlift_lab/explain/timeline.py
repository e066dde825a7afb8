"""Which request had which slot in each step, for all pictures that show slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chairlift_lab.explain.recording import Run

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
    cells: tuple[SlotCell, ...]  # for every slot and turn
    finished: dict[str, int]  # request -> turn of its last token
    useful: tuple[int, ...]  # tokens of requests, by turn
    padding: tuple[int, ...]  # padding tokens, by turn

    def count(self, *kinds: str) -> int:
        counted = Counter(cell.kind for cell in self.cells)
        return sum(counted[kind] for kind in kinds)

    @property
    def bubbles(self) -> int:
        """Slots, over all turns, that computed nothing useful while they kept a request waiting or cost a row."""
        return self.count(*BUBBLES)


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
        idle = set(step.idle) if step else set()
        slot_of = {name: slot for name, slot in slot_of.items() if name in chunks or name in idle}
        for name in chunks:
            if name not in slot_of:
                slot_of[name] = min(set(range(run.slots)) - set(slot_of.values()))
        request_waits = any(request.turn <= turn < first[request.name] for request in run.requests)
        at = {slot: name for name, slot in slot_of.items()}
        for slot in range(run.slots):
            if slot not in at:
                cells.append(SlotCell(turn, slot, "blocked" if request_waits else "empty"))
                continue
            name = at[slot]
            if name in idle:
                cells.append(SlotCell(turn, slot, "idle", name))
            else:
                kind = "decode" if chunks[name].decode else "prefill"
                cells.append(SlotCell(turn, slot, kind, name, chunks[name].count))
                finished[name] = turn
        if step is not None:
            useful[turn] = sum(chunk.count for chunk in step.chunks)
            padding[turn] = step.padding
    return SlotTimeline(run.slots, run.turns, tuple(cells), finished, tuple(useful), tuple(padding))

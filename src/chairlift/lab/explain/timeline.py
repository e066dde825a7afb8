"""Who sat where, step by step: the same for every picture that shows seats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chairlift.lab.explain.recording import Run

BUBBLES = ("idle", "blocked")


@dataclass(frozen=True, slots=True)
class SeatCell:
    """What one seat did in one turn: prefill, decode, idle (its request is done, its batch is not), blocked (nobody
    sits there although somebody waits) or empty (and nobody waits)."""

    turn: int
    seat: int
    kind: str
    request: str = ""
    count: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class Timeline:
    seats: int
    turns: int
    cells: tuple[SeatCell, ...]  # of every seat in every turn
    finished: dict[str, int]  # request -> the turn in which its last token came
    useful: tuple[int, ...]  # tokens by turn that somebody asked for
    padding: tuple[int, ...]  # tokens by turn that were computed for nobody

    def count(self, *kinds: str) -> int:
        counted = Counter(cell.kind for cell in self.cells)
        return sum(counted[kind] for kind in kinds)

    @property
    def bubbles(self) -> int:
        """Seats, over all turns, that did nothing for anybody and kept somebody out or cost a row."""
        return self.count(*BUBBLES)


def timeline(run: Run) -> Timeline:
    """Everyone takes the first free seat and leaves it when the engine lets go of it."""
    seated: dict[str, int] = {}
    cells: list[SeatCell] = []
    finished: dict[str, int] = {}
    useful, padding = [0] * run.turns, [0] * run.turns
    steps = {step.turn: step for step in run.steps}
    first = {chunk.request: step.turn for step in reversed(run.steps) for chunk in step.chunks}
    for turn in range(run.turns):
        step = steps.get(turn)
        chunks = {chunk.request: chunk for chunk in step.chunks} if step else {}
        idle = set(step.idle) if step else set()
        seated = {name: seat for name, seat in seated.items() if name in chunks or name in idle}
        for name in chunks:
            if name not in seated:
                seated[name] = min(set(range(run.seats)) - set(seated.values()))
        someone_waits = any(rider.turn <= turn < first[rider.name] for rider in run.riders)
        at = {seat: name for name, seat in seated.items()}
        for seat in range(run.seats):
            if seat not in at:
                cells.append(SeatCell(turn, seat, "blocked" if someone_waits else "empty"))
                continue
            name = at[seat]
            if name in idle:
                cells.append(SeatCell(turn, seat, "idle", name))
            else:
                kind = "decode" if chunks[name].decode else "prefill"
                cells.append(SeatCell(turn, seat, kind, name, chunks[name].count))
                finished[name] = turn
        if step is not None:
            useful[turn] = sum(chunk.count for chunk in step.chunks)
            padding[turn] = step.padding
    return Timeline(run.seats, run.turns, tuple(cells), finished, tuple(useful), tuple(padding))

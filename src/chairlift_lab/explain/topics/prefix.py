"""Requests with the same prefix share blocks; the first write to a shared block makes a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift_lab.explain.drawing import INK, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, StepRecord, TimedRequest, TopicEngines

BLOCK_SIZE, NUM_BLOCKS = 4, 24
SYSTEM = 12  # tokens that all prompts begin with: three full blocks
MOMENTS = {
    "sharing": "B finds the beginning of A",
    "copying": "C wants two answers, and they part",
    "leaving": "A is done",
}


@dataclass(frozen=True, slots=True)
class PrefixData:
    block_size: int
    system: int
    cached_tokens: dict[str, int]  # tokens that each request did not have to compute when it was admitted
    sharing: int  # index of the step in which A and B share the beginning
    copying: int  # index of the step in which a block is copied
    leaving: int  # index of the first step without A
    run: Run


def run(engines: TopicEngines) -> PrefixData:
    system = engines.prompt(SYSTEM)
    requests = [
        TimedRequest("A", (*system, *engines.prompt(5, skip=30)), 9),
        TimedRequest("B", (*system, *engines.prompt(7, skip=40)), 8, turn=2),
        TimedRequest("C", (*system, *engines.prompt(6, skip=50)), 9, turn=4, n=2),
    ]
    played = engines.record(requests, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batch_requests=8)
    steps = list(enumerate(played.steps))
    return PrefixData(
        BLOCK_SIZE,
        SYSTEM,
        {event.request_id: event.cached_tokens for event in played.admitted()},
        next(index for index, step in steps if {"A", "B"} <= set(step.tables)),
        next(index for index, step in steps if copies_of(step)),
        next(index for index, step in steps if index and "A" not in step.tables),
        played,
    )


def block_state(step: StepRecord, block: int) -> str:
    """The state of a block: shared (in several tables), own (in one), reusable (cached, in none) or free."""
    references = step.references[block]
    if references:
        return "shared" if references > 1 else "own"
    return "reusable" if block in step.cached else "free"


def copies_of(step: StepRecord) -> list[tuple[str, int, int]]:
    return [(chunk.request, source, target) for chunk in step.chunks for source, target in chunk.copies]


def draw(data: PrefixData) -> Sheet:
    sheet = Sheet("Block tables of requests that begin alike", size=(11.5, 9.6))
    grid = sheet.grid(3, 2, width_ratios=[1.25, 1], height_ratios=[2.3, 4.2, 3.3])
    for row, (name, what) in enumerate(MOMENTS.items()):
        step = data.run.steps[getattr(data, name)]
        tables = sheet.panel(name, grid[row, 0])
        _draw_tables(tables, step)
        tables.title(f"step {step.step + 1}: {what}")
        pool = sheet.panel(f"{name} pool", grid[row, 1])
        used = sum(map(bool, step.references))
        pool.title("the memory", f"{used} of {len(step.references)} blocks in use")
        _draw_pool(pool, step, columns=8)
    sheet.legend(
        {
            "shared": "shared: in several tables",
            "own": "in one table",
            "copied": "copied before it is written (copy-on-write)",
            "reusable": "free, but can be found again",
            "free": "free",
        },
        columns=5,
    )
    return sheet


def _draw_pool(panel: Panel, step: StepRecord, *, columns: int) -> None:
    """Draw every block with its number and its reference count."""
    for block, references in enumerate(step.references):
        kind = block_state(step, block)
        x, y = block % columns, block // columns
        look = look_of(kind)
        panel.cell(x, y, kind)
        panel.text(x + 0.5, y + 0.36, str(block), color=look.ink, size=9.5)
        if references:
            panel.text(x + 0.5, y + 0.74, f"×{references}", color=look.ink, size=7.5)
    panel.grid_only(columns, -(-len(step.references) // columns))
    panel.axes.set_anchor("NW")


def _draw_tables(panel: Panel, step: StepRecord) -> None:
    copies = copies_of(step)
    targets = {(request, target): source for request, source, target in copies}
    names = list(step.tables)
    shown = [f"{name.partition('#')[0]}, 2nd" if "#" in name else name for name in names]
    longest = max(map(len, step.tables.values()))
    for row, name in enumerate(names):
        for place, block in enumerate(step.tables[name]):
            kind = "copied" if (name, block) in targets else block_state(step, block)
            panel.cell(place, row * 1.4, kind, str(block), size=10)
    for request, source, target in copies:
        place = step.tables[request].index(target)
        giver = next(name for name in names if source in step.tables[name])
        begin = (place + 0.5, names.index(giver) * 1.4 + 1)
        end = (place + 0.5, names.index(request) * 1.4 + 0.04)
        panel.arrow(begin, end, mutation_scale=11, color=INK, linewidth=1.2)
        panel.text(place + 0.62, (begin[1] + end[1]) / 2, f"copy {source} → {target}", ha="left", size=8)
    panel.grid_only(longest, len(names) * 1.4 - 0.4, equal=False)
    panel.axes.set_yticks([row * 1.4 + 0.5 for row in range(len(names))], shown, fontsize=10, color=INK)
    places = range(longest)
    panel.names_above([place + 0.5 for place in places], [f"logical {place}" for place in places], fontsize=8)


def saved(step: StepRecord) -> int:
    """Additional blocks that would be needed without sharing."""
    return sum(references - 1 for references in step.references if references)


def reusable(step: StepRecord) -> int:
    return sum(block_state(step, block) == "reusable" for block in range(len(step.references)))


def figures(data: PrefixData) -> dict[str, Any]:
    sharing, copying = data.run.steps[data.sharing], data.run.steps[data.copying]
    _, source, target = copies_of(copying)[0]
    return {
        "sharing_step": sharing.step + 1,
        "copying_step": copying.step + 1,
        "cached_blocks": data.cached_tokens["B"] // data.block_size,
        "saved_by_sharing": saved(sharing),
        "saved_while_copying": saved(copying),
        "copies": len(copies_of(copying)),
        "source": source,
        "target": target,
        "reusable": reusable(data.run.steps[data.leaving]),
    }


TOPIC = Topic("prefix", run, {"prefix": draw}, figures)

"""Attention masks: who may see whom, found out by asking the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chairlift_lab.explain.drawing import INK, Panel, Sheet
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, StepRecord, TimedRequest, TopicEngines, who_sees_whom

BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request's part of a step."""

    request: str
    start: int  # tokens before this are in the cache
    end: int
    rows: int  # more than end - start where the rest is padding


@dataclass(frozen=True, slots=True)
class Mask:
    """One step: its rows are those of all sequences, its columns all positions of all sequences."""

    sequences: tuple[Sequence, ...]
    sees: tuple[tuple[bool, ...], ...]
    padding_tokens: int  # counted by the engine


@dataclass(frozen=True, slots=True)
class MasksData:
    causal: Mask
    chunked: tuple[Mask, ...]  # the steps that read one prompt
    padded: Mask
    padded_width: int  # positions that every sequence of the padded batch is filled up to
    ragged: Mask
    runs: dict[str, Run]


def run(engines: TopicEngines) -> MasksData:
    def request(name: str, prompt: int, new: int = 1, turn: int = 0) -> TimedRequest:
        return TimedRequest(name, engines.prompt(prompt, skip=5 * (ord(name) - ord("A"))), new, turn)

    causal, causal_run = _masks(engines, [request("A", 10)], lambda step: True)
    chunked, chunked_run = _masks(engines, [request("A", 14)], lambda step: True, max_batch_tokens=6)
    three = [request("A", 5), request("B", 3), request("C", 7)]
    padded, padded_run = _masks(engines, three, lambda step: len(step.chunks) == 3, attention="padded")
    four = [request("A", 5, 6), request("B", 3, 6, 1), request("C", 14, 4, 2), request("D", 4, 3, 3)]
    ragged, ragged_run = _masks(engines, four, _mixed, max_batch_tokens=12)
    longest = max(sequence.end for sequence in padded[0].sequences)
    return MasksData(
        causal[0],
        tuple(chunked),
        padded[0],
        -(-longest // BLOCK_SIZE) * BLOCK_SIZE,
        ragged[0],
        {"causal": causal_run, "chunked": chunked_run, "padded": padded_run, "ragged": ragged_run},
    )


def _mixed(step: StepRecord) -> bool:
    """Has decodes, a chunk of a prompt whose start is cached, and a new prompt."""
    starts = [chunk.start for chunk in step.chunks if not chunk.decode]
    return any(chunk.decode for chunk in step.chunks) and 0 in starts and any(starts)


def _masks(
    engines: TopicEngines, requests: list[TimedRequest], choose: Callable[[StepRecord], bool], **options: Any
) -> tuple[list[Mask], Run]:
    """The masks of the chosen steps of a run."""
    run, answers = engines.record_calls(
        requests,
        lambda call: (who_sees_whom(call), [end - start for start, end in pairwise(call.layout.offsets)]),
        layer=0,
        block_size=BLOCK_SIZE,
        **({"attention": "ragged"} | options),
    )
    masks = []
    for step, (sees, rows) in zip(run.steps, answers, strict=True):
        if choose(step):
            pairs = zip(step.chunks, rows, strict=True)
            sequences = tuple(Sequence(chunk.request, chunk.start, chunk.end, count) for chunk, count in pairs)
            masks.append(Mask(sequences, tuple(map(tuple, sees)), step.padding))
    return masks, run


def draw(data: MasksData) -> Sheet:
    sheet = Sheet("Who may look at whom: four masks, each asked from the engine", size=(11.5, 8.8))
    grid = sheet.grid(2, 2, width_ratios=[1, 2.05], height_ratios=[1, 1.12])

    def panel(cell: Any, title: str) -> Panel:
        panel = sheet.panel(title.partition(":")[0], cell)
        panel.title(title)
        return panel

    _draw_steps(panel(grid[0, 0], "causal: one prompt, one step"), (data.causal,))
    _draw_steps(panel(grid[1, 0], f"chunked: one prompt, {len(data.chunked)} steps"), data.chunked)
    _draw_padded(panel(grid[0, 1], "padded: three prompts in equal boxes"), data.padded, data.padded_width)
    _draw_ragged(panel(grid[1, 1], "ragged: four requests in one step, no boxes"), data.ragged)
    sheet.legend(
        {
            "new": "sees a token of this step",
            "cached": "sees a token in the cache",
            "masked": "must not see: it comes later",
            "padding": "padding: computed, and thrown away",
        }
    )
    return sheet


def _kind(sequence: Sequence, row: int, position: int, sees: bool) -> str:
    if row >= sequence.end - sequence.start or position >= sequence.end:
        return "padding"
    if not sees:
        return "masked"
    return "cached" if position < sequence.start else "new"


def _draw_sequence(panel: Panel, mask: Mask, index: int, x: int, y: int, width: int) -> None:
    """Draw the rows of one sequence from (x, y) on, each with `width` positions of that sequence."""
    sequence, before = mask.sequences[index], mask.sequences[:index]
    first_row, first_column = sum(each.rows for each in before), sum(each.end for each in before)
    for row in range(sequence.rows):
        for position in range(width):
            sees = position < sequence.end and mask.sees[first_row + row][first_column + position]
            panel.cell(x + position, y + row, _kind(sequence, row, position, sees))


def _draw_steps(panel: Panel, masks: tuple[Mask, ...]) -> None:
    """One request, its steps one below the other."""
    width, y = masks[-1].sequences[0].end, 0
    for mask in masks:
        (sequence,) = mask.sequences
        _draw_sequence(panel, mask, 0, 0, y, sequence.end)
        y += sequence.rows
        if y < width:
            panel.axes.plot([0, width], [y, y], color=INK, linewidth=1.2)
    panel.grid_only(width, y)
    panel.axis_names("token that is seen (key)", "token that looks (query)")
    numbers = [str(number) if number % 2 == 0 else "" for number in range(width)]
    panel.column_names(numbers)
    panel.row_names(numbers)


def _draw_padded(panel: Panel, mask: Mask, width: int) -> None:
    """Every sequence as a rectangle of the same size."""
    for index, sequence in enumerate(mask.sequences):
        x = index * (width + 1)
        _draw_sequence(panel, mask, index, x, 0, width)
        panel.text(x + width / 2, -0.55, f"{sequence.request}: {sequence.end - sequence.start} tokens", size=9)
    _frame_rows(panel, len(mask.sequences) * (width + 1) - 1, mask.sequences[0].rows)


def _draw_ragged(panel: Panel, mask: Mask) -> None:
    """One list of rows, one list of positions. What belongs to different requests is never looked at: no cell."""
    x = y = 0
    names = []
    for index, sequence in enumerate(mask.sequences):
        _draw_sequence(panel, mask, index, x, y, sequence.end)
        names += [f"{sequence.request}{position}" for position in range(sequence.start, sequence.start + sequence.rows)]
        if sequence.start:
            panel.text(x + sequence.start / 2, -0.6, f"{sequence.request}: {sequence.start} cached", size=7.5)
        x, y = x + sequence.end, y + sequence.rows
    _frame_rows(panel, x, y)
    panel.row_names(names)


def _frame_rows(panel: Panel, width: int, rows: int) -> None:
    """Show the cells, with room for words above them."""
    panel.grid_only(width, rows)
    panel.axes.set_ylim(rows + 0.1, -1.1)
    panel.axes.set_anchor("NW")


def visible(mask: Mask) -> int:
    return sum(map(sum, mask.sees))


def crossing(mask: Mask) -> int:
    """Pairs of different requests where one sees the other."""
    owners = [sequence.request for sequence in mask.sequences for _ in range(sequence.end)]
    rows = [sequence.request for sequence in mask.sequences for _ in range(sequence.rows)]
    return sum(
        sees and owner != own
        for own, seen in zip(rows, mask.sees, strict=True)
        for owner, sees in zip(owners, seen, strict=True)
    )


def figures(data: MasksData) -> dict[str, Any]:
    size = data.causal.sequences[0].end
    chunks = [sequence.end - sequence.start for mask in data.chunked for sequence in mask.sequences]
    return {
        "size": size,
        "square": size * size,
        "visible": visible(data.causal),
        "visible_chunked": sum(map(visible, data.chunked)),
        "visible_ragged": visible(data.ragged),
        "chunks": ", ".join(map(str, chunks)),
        "boxes": sum(sequence.rows for sequence in data.padded.sequences) * data.padded_width,
        "useful": sum(sequence.end * (sequence.end + 1) // 2 for sequence in data.padded.sequences),
        "crossing": crossing(data.ragged),
    }


TOPIC = Topic("masks", run, {"masks": draw}, figures)

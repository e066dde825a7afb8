"""Attention masks: who may see whom, found out by asking the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chairlift_lab.explain.palette import Theme
from chairlift_lab.explain.recording import ChunkRecord, Run, StepRecord, TimedRequest, record
from chairlift_lab.explain.sheet import Panel, Sheet
from chairlift_lab.explain.topic import Picture, Topic
from chairlift_lab.explain.topic_engines import TopicEngines

BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request's part of a step."""

    request: str
    start: int  # tokens before this are in the cache
    end: int
    rows: int  # of the batch; more than end - start where the rest is padding


@dataclass(frozen=True, slots=True)
class Mask:
    """One step: its rows are those of all sequences, its columns all positions of all sequences."""

    sequences: tuple[Sequence, ...]
    sees: tuple[tuple[bool, ...], ...]
    padding_tokens: int  # as the engine counted them


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
    engines: TopicEngines, requests: list[TimedRequest], wanted: Callable[[StepRecord], bool], **options: Any
) -> tuple[list[Mask], Run]:
    """The masks of the wanted steps of a run."""
    from chairlift_lab.explain.listening import AttentionCall, listening, who_sees_whom

    started = engines.start(block_size=BLOCK_SIZE, prefix_caching=False, **({"attention": "ragged"} | options))
    found: list[tuple[list[list[bool]], list[int]]] = []

    def listen(call: AttentionCall) -> None:
        if call.layer.index == 0:
            offsets = call.layout.offsets
            found.append((who_sees_whom(call), [end - start for start, end in pairwise(offsets)]))

    with listening(started, listen):
        run = record(started.engine, requests)
    masks = []
    for step, (sees, rows) in zip(run.steps, found, strict=True):
        if wanted(step):
            sequences = tuple(map(_sequence, step.chunks, rows))
            masks.append(Mask(sequences, tuple(map(tuple, sees)), step.padding))
    return masks, run


def _sequence(chunk: ChunkRecord, rows: int) -> Sequence:
    return Sequence(chunk.request, chunk.start, chunk.end, rows)


def draw(data: MasksData, theme: Theme) -> Sheet:
    sheet = Sheet(theme, "Who may look at whom: four masks, each asked from the engine", size=(11.5, 8.8))
    grid = sheet.grid(2, 2, width_ratios=[1, 2.05], height_ratios=[1, 1.12])
    causal = sheet.panel("causal", grid[0, 0])
    causal.title("causal: one prompt, one step")
    _draw_steps(causal, [data.causal])
    chunked = sheet.panel("chunked", grid[1, 0])
    chunked.title(f"chunked: one prompt, {len(data.chunked)} steps")
    _draw_steps(chunked, data.chunked)
    padded = sheet.panel("padded", grid[0, 1])
    padded.title("padded: three prompts in equal boxes")
    _draw_padded(padded, data.padded, data.padded_width)
    ragged = sheet.panel("ragged", grid[1, 1])
    ragged.title("ragged: four requests in one step, no boxes")
    _draw_ragged(ragged, data.ragged)
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


def _draw_steps(panel: Panel, masks: tuple[Mask, ...] | list[Mask]) -> None:
    """One request, its steps one below the other."""
    width, y = masks[-1].sequences[0].end, 0
    for mask in masks:
        (sequence,) = mask.sequences
        for row, seen in enumerate(mask.sees):
            for position, sees in enumerate(seen):
                panel.cell(position, y + row, _kind(sequence, row, position, sees))
        y += sequence.rows
        if y < width:
            panel.axes.plot([0, width], [y, y], color=panel.theme.ink, linewidth=1.2)
    panel.grid_only(width, y)
    panel.axes.set_xlabel("token that is seen (key)", color=panel.theme.muted)
    panel.axes.set_ylabel("token that looks (query)", color=panel.theme.muted)
    numbers = [str(place) if place % 2 == 0 else "" for place in range(width)]
    panel.column_names(numbers)
    panel.row_names(numbers)


def _draw_padded(panel: Panel, mask: Mask, width: int) -> None:
    """Every sequence as a rectangle of the same size."""
    first_row = first_column = 0
    for index, sequence in enumerate(mask.sequences):
        x = index * (width + 1)
        for row in range(sequence.rows):
            for position in range(width):
                sees = position < sequence.end and mask.sees[first_row + row][first_column + position]
                panel.cell(x + position, row, _kind(sequence, row, position, sees))
        panel.text(x + width / 2, -0.55, f"{sequence.request}: {sequence.end - sequence.start} tokens", size=9)
        first_row += sequence.rows
        first_column += sequence.end
    rows = mask.sequences[0].rows
    panel.grid_only(len(mask.sequences) * (width + 1) - 1, rows)
    panel.axes.set_ylim(rows + 0.1, -1.1)
    panel.axes.set_anchor("NW")
    panel.axes.set_xticks([])
    panel.axes.set_yticks([])


def _draw_ragged(panel: Panel, mask: Mask) -> None:
    """One list of rows, one list of positions. What belongs to different requests is never looked at: no cell."""
    first_row = first_column = 0
    names = []
    for sequence in mask.sequences:
        columns = range(first_column, first_column + sequence.end)
        for row in range(sequence.rows):
            for column, sees in enumerate(mask.sees[first_row + row]):
                if column in columns or sees:
                    panel.cell(column, first_row + row, _kind(sequence, row, column - first_column, sees))
            names.append(f"{sequence.request}{sequence.start + row}")
        if sequence.start:
            panel.text(
                first_column + sequence.start / 2, -0.6, f"{sequence.request}: {sequence.start} cached", size=7.5
            )
        first_row += sequence.rows
        first_column += sequence.end
    panel.grid_only(first_column, first_row)
    panel.axes.set_ylim(first_row + 0.1, -1.1)
    panel.axes.set_anchor("NW")
    panel.row_names(names)
    panel.axes.set_xticks([])


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


def says(data: MasksData) -> str:
    return (
        f"Causal: {visible(data.causal)} pairs seen. Chunked: {sum(map(visible, data.chunked))} over "
        f"{len(data.chunked)} steps. Padded: {data.padded.padding_tokens} rows of padding. "
        f"Ragged: {visible(data.ragged)} pairs in {len(data.ragged.sees)} rows, {crossing(data.ragged)} of them "
        "between two requests."
    )


def teach(data: MasksData) -> str:
    size = data.causal.sequences[0].end
    chunks = [sequence.end - sequence.start for mask in data.chunked for sequence in mask.sequences]
    boxes = sum(sequence.rows for sequence in data.padded.sequences) * data.padded_width
    useful = sum(sequence.end * (sequence.end + 1) // 2 for sequence in data.padded.sequences)
    return f"""
In attention, every token looks at other tokens. A **mask** says which ones it may look at. The rule never changes: a
token sees itself and what came before it **in its own text**. What changes is how many texts share a step, and how
much of them is in the cache already.

[[masks]]

These masks are not drawn from a formula. For each square the engine was asked: a value in the cache was changed, and
the rows whose output changed are the ones that see it.

## Causal

One prompt of {size} tokens, read in one step. Row 3 sees columns 0 to 3. That makes the triangle:
{visible(data.causal)} of {size * size} pairs.

## Chunked

A longer prompt, read in pieces of {", ".join(map(str, chunks))} tokens (lines between them). The later pieces see the
earlier ones in the **cache** (green). Put together it is the same triangle: reading in pieces changes nothing but the
time at which things are computed.

## Padded

The classic batch needs boxes of the same size. The longest prompt decides how large they are, and what the others do
not fill is **padding**: {data.padded.padding_tokens} rows are computed and thrown away. Of {boxes} pairs, {useful} are
of any use.

## Ragged

What this engine does. The tokens of all requests stand in **one list**, without padding: two requests that make one
token each (their rows see everything they have in the cache), a piece of a long prompt, and a new prompt. Between two
requests there is not even a cell: nothing is computed there, so that there is nothing to hide. Pairs of different
requests where one saw the other: {crossing(data.ragged)}.
"""


TOPIC = Topic(
    name="masks",
    title="Attention masks",
    question="Which tokens may look at which, when many texts share one step?",
    run=run,
    pictures=(Picture("masks", draw, says),),
    teach=teach,
    code=(
        "chairlift/attention/interface.py",
        "chairlift/attention/backends/padded.py",
        "chairlift/attention/input_batch.py",
    ),
)

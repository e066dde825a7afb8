"""Who may see whom in one step: masks, found out by asking the engine, and three ways to compute the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from chairlift_lab.explain.drawing import INK, Panel, Sheet, owner_look
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import AttentionCall, Run, StepRecord, TimedRequest, TopicEngines, who_sees_whom

MASK_BLOCK_SIZE, KERNEL_BLOCK_SIZE = 8, 4


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


class Masks(Topic):
    """Four masks, each asked from the engine."""

    def run(self, engines: TopicEngines) -> MasksData:
        def request(name: str, prompt: int, new: int = 1, turn: int = 0) -> TimedRequest:
            return TimedRequest(name, engines.prompt(prompt, skip=5 * (ord(name) - ord("A"))), new, turn)

        causal, causal_run = _masks(engines, [request("A", 10)], lambda step: True)
        chunked, chunked_run = _masks(engines, [request("A", 14)], lambda step: True, max_batch_tokens=6)
        three = [request("A", 5), request("B", 3), request("C", 7)]
        padded, padded_run = _masks(engines, three, lambda step: len(step.chunks) == 3, attention="padded")
        four = [request("A", 5, 6), request("B", 3, 6, 1), request("C", 14, 4, 2), request("D", 4, 3, 3)]
        ragged, ragged_run = _masks(engines, four, self.mixed, max_batch_tokens=12)
        width = _in_blocks(max(sequence.end for sequence in padded[0].sequences), MASK_BLOCK_SIZE)
        runs = {"causal": causal_run, "chunked": chunked_run, "padded": padded_run, "ragged": ragged_run}
        return MasksData(causal[0], tuple(chunked), padded[0], width, ragged[0], runs)

    def mixed(self, step: StepRecord) -> bool:
        """Has decodes, a chunk of a prompt whose start is cached, and a new prompt."""
        starts = [chunk.start for chunk in step.chunks if not chunk.decode]
        return any(chunk.decode for chunk in step.chunks) and 0 in starts and any(starts)

    def draw(self, data: MasksData) -> Sheet:
        sheet = Sheet("masks")
        grid = sheet.grid(2, 2, width_ratios=[1, 2.05], height_ratios=[1, 1.12])

        def panel(cell: Any, title: str) -> Panel:
            panel = sheet.panel(title.partition(":")[0], cell)
            panel.title(title)
            return panel

        _draw_steps(panel(grid[0, 0], "causal: one prompt, one step"), (data.causal,))
        _draw_steps(panel(grid[1, 0], f"chunked: one prompt, {len(data.chunked)} steps"), data.chunked)
        _draw_padded(panel(grid[0, 1], "padded: three prompts in equal boxes"), data.padded, data.padded_width)
        _draw_ragged(panel(grid[1, 1], "ragged: four requests in one step, no boxes"), data.ragged)
        return sheet

    def figures(self, data: MasksData) -> dict[str, Any]:
        def visible(*masks: Mask) -> int:
            return sum(sum(map(sum, mask.sees)) for mask in masks)

        size = data.causal.sequences[0].end
        chunks = [sequence.end - sequence.start for mask in data.chunked for sequence in mask.sequences]
        return {
            "size": size,
            "square": size * size,
            "visible": visible(data.causal),
            "visible_chunked": visible(*data.chunked),
            "visible_ragged": visible(data.ragged),
            "chunks": ", ".join(map(str, chunks)),
            "boxes": sum(sequence.rows for sequence in data.padded.sequences) * data.padded_width,
            "useful": sum(sequence.end * (sequence.end + 1) // 2 for sequence in data.padded.sequences),
            "crossing": self.crossing(data.ragged),
        }

    def crossing(self, mask: Mask) -> int:
        """Pairs of different requests where one sees the other."""
        owners = [sequence.request for sequence in mask.sequences for _ in range(sequence.end)]
        rows = [sequence.request for sequence in mask.sequences for _ in range(sequence.rows)]
        return sum(
            sees and owner != own
            for own, seen in zip(rows, mask.sees, strict=True)
            for owner, sees in zip(owners, seen, strict=True)
        )


def _in_blocks(positions: int, block_size: int) -> int:
    """The positions of all blocks that this number of tokens fills at least in part."""
    return -(-positions // block_size) * block_size


def _masks(
    engines: TopicEngines, requests: list[TimedRequest], choose: Callable[[StepRecord], bool], **options: Any
) -> tuple[list[Mask], Run]:
    """The masks of the chosen steps of a run."""
    run, answers = engines.record_calls(
        requests,
        lambda call: (who_sees_whom(call), [end - start for start, end in pairwise(call.layout.offsets)]),
        layer=0,
        block_size=MASK_BLOCK_SIZE,
        **({"attention": "ragged"} | options),
    )
    masks = []
    for step, (sees, rows) in zip(run.steps, answers, strict=True):
        if choose(step):
            pairs = zip(step.chunks, rows, strict=True)
            sequences = tuple(Sequence(chunk.request, chunk.start, chunk.end, count) for chunk, count in pairs)
            masks.append(Mask(sequences, tuple(map(tuple, sees)), step.padding))
    return masks, run


def _draw_sequence(panel: Panel, mask: Mask, index: int, x: int, y: int, width: int) -> None:
    """Draw the rows of one sequence from (x, y) on, each with `width` positions of that sequence."""
    sequence, before = mask.sequences[index], mask.sequences[:index]
    first_row, first_column = sum(each.rows for each in before), sum(each.end for each in before)
    for row in range(sequence.rows):
        for position in range(width):
            if row >= sequence.end - sequence.start or position >= sequence.end:
                kind = "padding"
            elif not mask.sees[first_row + row][first_column + position]:
                kind = "masked"
            else:
                kind = "cached" if position < sequence.start else "new"
            panel.cell(x + position, y + row, kind)


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
    panel.grid_only(len(mask.sequences) * (width + 1) - 1, mask.sequences[0].rows, above=1.1)
    panel.axes.set_anchor("NW")


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
    panel.grid_only(x, y, above=1.1)
    panel.axes.set_anchor("NW")
    panel.row_names(names)


# ---- three ways to compute a step -----------------------------------------------------------------------------------

REPEATS = 30
WAYS = {
    "bursted": "bursted: a call for each request",
    "padded": "padded: one call, equal boxes",
    "ragged": "ragged: one call, no boxes",
}


@dataclass(frozen=True, slots=True)
class KernelData:
    """One way to compute the same step."""

    rows: tuple[int, ...]  # the rows of each request, padding included
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    requests: tuple[str, ...]
    calls: int
    padding: int  # rows, as the engine counted them
    width: int  # positions that each request of a padded batch is filled up to; else 0
    seconds: float  # the time of one layer's attention, at best

    @property
    def pairs(self) -> int:
        """Products of a query and a key that this way computes."""
        return sum(rows * (self.width or end) for rows, end in zip(self.rows, self.ends, strict=True))

    @property
    def useful_pairs(self) -> int:
        spans = zip(self.starts, self.ends, strict=True)
        return sum(sum(range(start + 1, end + 1)) for start, end in spans)


@dataclass(frozen=True, slots=True)
class KernelsData:
    ways: dict[str, KernelData]
    apart: float  # how much the outputs of two ways differ, at most
    runs: dict[str, Run]


class Kernels(Topic):
    """The attention of one step, computed request by request, as one padded batch, and as one ragged batch."""

    def run(self, engines: TopicEngines) -> KernelsData:
        requests = [
            TimedRequest("A", engines.prompt(13), 6),
            TimedRequest("B", engines.prompt(4, skip=9), 6),
            TimedRequest("C", engines.prompt(8, skip=20), 6, turn=1),
            TimedRequest("D", engines.prompt(4, skip=31), 2, turn=3),
        ]
        measured = {name: self._measure(engines, name, requests) for name in WAYS}
        outputs = [output for _, output, _ in measured.values()]
        apart = max(float((output - other).abs().max()) for output, other in pairwise(outputs))
        ways = {name: way for name, (way, _, _) in measured.items()}
        return KernelsData(ways, apart, {name: run for name, (_, _, run) in measured.items()})

    def _measure(
        self, engines: TopicEngines, name: str, requests: list[TimedRequest]
    ) -> tuple[KernelData, Tensor, Run]:
        options: dict[str, Any] = {"block_size": KERNEL_BLOCK_SIZE, "attention": name}
        run, calls = engines.record_calls(requests, lambda call: (call, _best_seconds(call)), layer=0, **options)
        mixed_step = next(index for index, step in enumerate(run.steps) if self.mixed(step, len(requests)))
        (call, seconds), step = calls[mixed_step], run.steps[mixed_step]
        layout = call.layout
        data = KernelData(
            rows=tuple(end - start for start, end in pairwise(layout.offsets)),
            starts=tuple(layout.starts),
            ends=tuple(layout.ends),
            requests=tuple(chunk.request for chunk in step.chunks),
            calls=len(layout.starts) if name == "bursted" else 1,
            padding=step.padding,
            width=_in_blocks(max(layout.ends), KERNEL_BLOCK_SIZE) if name == "padded" else 0,
            seconds=seconds,
        )
        spans = zip(layout.offsets, layout.starts, layout.ends, strict=False)
        useful = torch.cat([call.output[offset : offset + end - start] for offset, start, end in spans])
        return data, useful, run

    def mixed(self, step: StepRecord, requests: int) -> bool:
        return len(step.chunks) == requests and not all(chunk.decode for chunk in step.chunks)

    def draw(self, data: KernelsData) -> Sheet:
        sheet = Sheet("kernels")
        grid = sheet.grid(2, 2)
        for position, (name, way) in zip(((0, 0), (0, 1), (1, 0)), data.ways.items(), strict=True):
            panel = sheet.panel(name, grid[position])
            panel.title(WAYS[name])
            _draw_way(panel, name, way)
        times = sheet.panel("times", grid[1, 1])
        times.title("time of one layer's attention in this step")
        times.chart("microseconds", "")
        colours = [owner_look(index).fill for index in range(len(data.ways))]
        times.measures({name: 1e6 * way.seconds for name, way in data.ways.items()}, " {:,.0f} µs", colours)
        return sheet

    def figures(self, data: KernelsData) -> dict[str, Any]:
        counts = {f"{name}_pairs": way.pairs for name, way in data.ways.items()}
        return {**data.ways, **counts, "useful_pairs": data.ways["ragged"].useful_pairs}


def _best_seconds(call: AttentionCall) -> float:
    """The fastest of several calls, which other programs disturbed least."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        call.attention.attend(call.layer, call.q, call.k, call.v)
        best = min(best, time.perf_counter() - start)
    return best


def _draw_way(panel: Panel, name: str, way: KernelData) -> None:
    y, gap = 0.0, 0.9 if name == "bursted" else 0.0
    ticks = {}
    for request, rows, start, end in zip(way.requests, way.rows, way.starts, way.ends, strict=True):
        width = way.width or end
        for row in range(rows):
            for position in range(width):
                kind = "useful" if position <= start + row else "masked"
                if start + row >= end or position >= end:
                    kind = "padding"
                if name != "ragged" or kind == "useful":
                    panel.cell(position, y + row, kind)
        ticks[y + rows / 2] = f"{request}: {end - start} new, {start} cached"
        if name == "bursted":
            panel.frame(-0.15, y - 0.15, width + 0.3, rows + 0.3)
        y += rows + gap
    height, longest = y - gap, way.width or max(way.ends)
    if name != "bursted":
        panel.frame(-0.15, -0.15, longest + 0.3, height + 0.3)
    panel.grid_only(longest, height, equal=False, margin=0.4)
    panel.axes.set_yticks(list(ticks), list(ticks.values()))

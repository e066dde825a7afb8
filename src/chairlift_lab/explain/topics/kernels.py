"""The attention of one step, computed request by request, as one padded batch, and as one ragged batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from chairlift_lab.explain.drawing import Panel, Sheet, owner_look
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import AttentionCall, Run, StepRecord, TimedRequest, TopicEngines

BLOCK_SIZE = 4
REPEATS = 30
NAMES = {
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


@dataclass(frozen=True, slots=True)
class KernelsData:
    ways: dict[str, KernelData]
    apart: float  # how much the outputs of two ways differ, at most
    runs: dict[str, Run]


def run(engines: TopicEngines) -> KernelsData:
    requests = [
        TimedRequest("A", engines.prompt(13), 6),
        TimedRequest("B", engines.prompt(4, skip=9), 6),
        TimedRequest("C", engines.prompt(8, skip=20), 6, turn=1),
        TimedRequest("D", engines.prompt(4, skip=31), 2, turn=3),
    ]
    ways, outputs, runs = {}, [], {}
    for name in NAMES:
        ways[name], output, runs[name] = _measure(engines, name, requests)
        outputs.append(output)
    apart = max(float((output - other).abs().max()) for output, other in pairwise(outputs))
    return KernelsData(ways, apart, runs)


def _measure(engines: TopicEngines, name: str, requests: list[TimedRequest]) -> tuple[KernelData, Tensor, Run]:
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "attention": name}
    run, calls = engines.record_calls(requests, lambda call: (call, _best_seconds(call)), layer=0, **options)
    mixed_step = next(index for index, step in enumerate(run.steps) if _mixed(step, len(requests)))
    (call, seconds), step = calls[mixed_step], run.steps[mixed_step]
    layout = call.layout
    width = -(-max(layout.ends) // BLOCK_SIZE) * BLOCK_SIZE
    data = KernelData(
        rows=tuple(end - start for start, end in pairwise(layout.offsets)),
        starts=tuple(layout.starts),
        ends=tuple(layout.ends),
        requests=tuple(chunk.request for chunk in step.chunks),
        calls=len(layout.starts) if name == "bursted" else 1,
        padding=step.padding,
        width=width if name == "padded" else 0,
        seconds=seconds,
    )
    spans = zip(layout.offsets, layout.starts, layout.ends, strict=False)
    useful = torch.cat([call.output[offset : offset + end - start] for offset, start, end in spans])
    return data, useful, run


def _mixed(step: StepRecord, requests: int) -> bool:
    return len(step.chunks) == requests and not all(chunk.decode for chunk in step.chunks)


def _best_seconds(call: AttentionCall) -> float:
    """The fastest of several calls, which other programs disturbed least."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        call.attention.attend(call.layer, call.q, call.k, call.v)
        best = min(best, time.perf_counter() - start)
    return best


def draw(data: KernelsData) -> Sheet:
    sheet = Sheet("The attention of one step, computed in three ways", size=(11.5, 7.6))
    grid = sheet.grid(2, 2)
    for position, (name, way) in zip(((0, 0), (0, 1), (1, 0)), data.ways.items(), strict=True):
        panel = sheet.panel(name, grid[position])
        panel.title(NAMES[name])
        _draw_way(panel, name, way)
    _draw_times(sheet.panel("times", grid[1, 1]), data)
    sheet.legend(
        {
            "useful": "query × key that counts",
            "masked": "computed, then hidden by the mask",
            "padding": "padding",
        }
    )
    return sheet


def _draw_way(panel: Panel, name: str, way: KernelData) -> None:
    y, gap = 0.0, 0.9 if name == "bursted" else 0.0
    ticks = []
    for request, rows, start, end in zip(way.requests, way.rows, way.starts, way.ends, strict=True):
        width = way.width or end
        for row in range(rows):
            for position in range(width):
                kind = _kind(row, position, start, end)
                if name != "ragged" or kind == "useful":
                    panel.cell(position, y + row, kind)
        ticks.append((y + rows / 2, f"{request}: {end - start} new, {start} cached"))
        if name == "bursted":
            panel.frame(-0.15, y - 0.15, width + 0.3, rows + 0.3)
        y += rows + gap
    end_of_rows = y - gap
    longest = way.width or max(way.ends)
    if name != "bursted":
        panel.frame(-0.15, -0.15, longest + 0.3, end_of_rows + 0.3)
    panel.grid_only(longest, end_of_rows, equal=False)
    panel.axes.set_xlim(-0.4, longest + 0.4)
    panel.axes.set_ylim(end_of_rows + 0.4, -0.4)
    panel.axes.set_yticks([y for y, _ in ticks], [words for _, words in ticks])


def _kind(row: int, position: int, start: int, end: int) -> str:
    if start + row >= end or position >= end:
        return "padding"
    return "useful" if position <= start + row else "masked"


def _draw_times(panel: Panel, data: KernelsData) -> None:
    panel.title("time of one layer's attention in this step")
    colors = [owner_look(index).fill for index in range(len(data.ways))]
    panel.chart("microseconds", "")
    panel.measures({name: 1e6 * way.seconds for name, way in data.ways.items()}, " {:,.0f} µs", colors)


def pairs(way: KernelData) -> int:
    """Products of a query and a key that this way computes."""
    if way.width:
        return sum(way.rows) * way.width
    return sum(rows * end for rows, end in zip(way.rows, way.ends, strict=True))


def useful_pairs(way: KernelData) -> int:
    spans = zip(way.starts, way.ends, strict=True)
    return sum(sum(range(start + 1, end + 1)) for start, end in spans)


def figures(data: KernelsData) -> dict[str, Any]:
    counts = {f"{name}_pairs": pairs(way) for name, way in data.ways.items()}
    return {**data.ways, **counts, "useful_pairs": useful_pairs(data.ways["ragged"])}


TOPIC = Topic("kernels", run, {"kernels": draw}, figures)

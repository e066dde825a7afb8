"""`chairlift bench attention` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.attention.kernels import SharingPoint, TilingPoint
from chairlift_lab.bench.attention.kv_recompute import RecomputePoint
from chairlift_lab.bench.attention.modes import ModesPoint
from chairlift_lab.bench.attention.run import AttentionResults
from chairlift_lab.report.plots import PlotPanel, save_panels

COLOURS = {"ragged": "tab:blue", "padded": "tab:orange", "bursted": "tab:green"}
STYLES = (":", "--", "-")  # the more the lengths vary, the more solid


def plot_attention(path: Path, results: AttentionResults, footnote: str) -> None:
    save_panels(path, "Attention", footnote, attention_panels(results))


def attention_panels(results: AttentionResults) -> list[PlotPanel]:
    """One for each figure that was measured."""
    panels: list[PlotPanel] = []
    for kind in dict.fromkeys(point.kind for point in results.modes):
        points = [point for point in results.modes if point.kind == kind]
        panels.append(lambda axes, points=points: _modes(axes, points))  # type: ignore[misc]
    if results.tiling:
        panels += [lambda axes: _tiling_time(axes, results.tiling), lambda axes: _tiling_memory(axes, results.tiling)]
    if results.sharing:
        panels.append(lambda axes: _sharing(axes, results.sharing))
    if results.cache:
        panels.append(lambda axes: _cache(axes, results.cache))
    return panels


def _modes(axes: Any, points: Sequence[ModesPoint]) -> None:
    axes.set_title(f"{points[0].kind}: attention of a layer")
    variations = sorted({point.variation for point in points})
    for mode in points[0].seconds:
        for variation, style in zip(variations, STYLES[-len(variations) :], strict=False):
            chosen = [point for point in points if point.variation == variation]
            axes.plot(
                [point.batch for point in chosen],
                [point.seconds[mode] * 1e3 for point in chosen],
                style,
                marker="o",
                markersize=3,
                color=COLOURS.get(mode),
                label=f"{mode}, lengths vary by {variation:g}",
            )
    _logarithmic(axes, "requests in the batch", "ms", [point.batch for point in points])
    axes.legend(fontsize=6)


def _tiling_time(axes: Any, points: Sequence[TilingPoint]) -> None:
    axes.set_title("One prompt: time")
    _two_lines(
        axes,
        [point.tokens for point in points],
        {
            "whole score matrix": [None if p.full_seconds is None else p.full_seconds * 1e3 for p in points],
            "tiled": [point.tiled_seconds * 1e3 for point in points],
        },
    )
    _logarithmic(axes, "tokens", "ms", [point.tokens for point in points])


def _tiling_memory(axes: Any, points: Sequence[TilingPoint]) -> None:
    axes.set_title("One prompt: peak memory")
    _two_lines(
        axes,
        [point.tokens for point in points],
        {
            "whole score matrix": [p.full_bytes and p.full_bytes / 2**20 for p in points],
            "tiled": [p.tiled_bytes and p.tiled_bytes / 2**20 for p in points],
        },
    )
    _logarithmic(axes, "tokens", "MiB", [point.tokens for point in points])


def _sharing(axes: Any, points: Sequence[SharingPoint]) -> None:
    axes.set_title("Heads that share keys and values, relative to MHA")
    first = points[0]
    positions = range(len(points))
    axes.bar([x - 0.2 for x in positions], [p.bytes_per_token / first.bytes_per_token for p in points], 0.4)
    axes.bar([x + 0.2 for x in positions], [p.decode_seconds / first.decode_seconds for p in points], 0.4)
    axes.set_xticks(list(positions), [f"{point.name}, {point.kv_heads} KV heads" for point in points])
    axes.legend(["KV bytes per token", "decode time"])


def _cache(axes: Any, points: Sequence[RecomputePoint]) -> None:
    axes.set_title("Generating: keys and values kept, or computed anew")
    _two_lines(
        axes,
        [point.tokens for point in points],
        {
            "computed anew": [point.recompute_seconds for point in points],
            "kept": [point.cached_seconds for point in points],
        },
    )
    _logarithmic(axes, "tokens generated", "seconds", [point.tokens for point in points])


def _two_lines(axes: Any, x: Sequence[int], lines: dict[str, Sequence[float | None]]) -> None:
    for colour, (label, y) in zip(("tab:orange", "tab:blue"), lines.items(), strict=True):
        there = [(one, value) for one, value in zip(x, y, strict=True) if value]  # 0 has no place on a log scale
        axes.plot(*zip(*there, strict=True), marker="o", color=colour, label=label) if there else None
    axes.legend()


def _logarithmic(axes: Any, x: str, y: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    places = sorted(set(ticks))
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_xlabel(x)
    axes.set_ylabel(y)

"""The plot of `chairlift bench shapes`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.shapes.run import CaseResult
from chairlift_lab.report.plots import save_panels


def plot_shapes(
    path: Path,
    title: str,
    results: Sequence[CaseResult],
    footnote: str,
    times: tuple[str, Sequence[float]] | None = None,
) -> None:
    """`times`: the name of another engine, and our speed in each case as a multiple of its speed."""

    def share(axes: Any) -> None:
        axes.set_title("Share of the floor reached")
        axes.set_ylabel("%")
        bars = axes.bar([result.name for result in results], [100 * result.share_of_floor for result in results])
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_ylim(0, 100)
        axes.tick_params(axis="x", rotation=30)

    def per_step(axes: Any) -> None:
        axes.set_title("Milliseconds per step")
        names = [result.name for result in results]
        for label, shift, pick in (("measured", -0.2, "seconds"), ("floor", 0.2, "floor_seconds")):
            values = [1e3 * getattr(result, pick) / result.steps for result in results]
            places = [index + shift for index in range(len(names))]
            axes.bar_label(axes.bar(places, values, 0.4, label=label), fmt="%.3g", fontsize=8)
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.set_yscale("log")
        axes.legend(fontsize=8)

    def beside_peer(axes: Any) -> None:
        assert times is not None
        axes.set_title(f"Tokens/s, as a multiple of {times[0]}'s")
        axes.bar_label(axes.bar([result.name for result in results], times[1]), fmt="%.2f", fontsize=8)
        axes.axhline(1, color="grey", linewidth=1)
        axes.tick_params(axis="x", rotation=30)

    save_panels(path, title, footnote, [share, per_step] if times is None else [share, per_step, beside_peer])

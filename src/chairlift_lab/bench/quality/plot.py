"""The picture of `chairlift bench quality`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift_lab.report.plots import save_panels

if TYPE_CHECKING:
    from chairlift_lab.bench.quality.run import Quality


def plot_quality(path: Path, found: Sequence[Quality], footnote: str) -> None:
    names = [quality.mode.replace(", ", "\n") for quality in found]

    def loss(axes: Any) -> None:
        axes.bar(names, [100 * quality.change for quality in found], color="#0072B2")
        axes.axhline(2.0, color="#D55E00", linestyle="--", linewidth=1)
        axes.set_title("Perplexity increase, % (dashed: limit for a default)", fontsize=9)
        axes.tick_params(axis="x", labelsize=7)

    def agreement(axes: Any) -> None:
        axes.bar(names, [100 * quality.agreement for quality in found], color="#009E73")
        axes.set_ylim(80, 100)
        axes.set_title("Same likeliest token as float32, %", fontsize=9)
        axes.tick_params(axis="x", labelsize=7)

    save_panels(path, "The cost of rounding", footnote, [loss, agreement])

"""The plot of `chairlift bench speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.speculation.run import PLAIN, SpeculationPoint
from chairlift_lab.report.plots import PlotPanel, save_panels


def plot_speculation(path: Path, points: Sequence[SpeculationPoint], footnote: str) -> None:
    scenarios = list(dict.fromkeys(point.scenario for point in points))
    proposers = [name for name in dict.fromkeys(point.proposer for point in points) if name != PLAIN]

    def panel(scenario: str) -> PlotPanel:
        def draw(axes: Any) -> None:
            axes.set_title(scenario)
            axes.set_xlabel("requests")
            axes.set_ylabel("times as fast as without")
            for proposer in proposers:
                some = [point for point in points if (point.scenario, point.proposer) == (scenario, proposer)]
                batches = [point.batch for point in some]
                axes.plot(batches, [point.speedup for point in some], marker="o", label=proposer)
            axes.axhline(1.0, color="grey", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=8)

        return draw

    save_panels(path, "Speculation", footnote, [panel(scenario) for scenario in scenarios])

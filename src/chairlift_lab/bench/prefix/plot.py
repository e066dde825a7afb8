"""The plot of `chairlift bench prefix`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.prefix.run import PrefixPoint
from chairlift_lab.report.plots import PlotPanel, save_panels

FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "Prompt tokens found in the cache": ("%", lambda row: 100 * float(row["hit_rate"])),
    "Time to first token, median": ("seconds", lambda row: float(row["ttft_p50_ms"]) / 1e3),
    "Requests in a step": ("mean", lambda row: float(row["mean_batch_requests"])),
    "Output tokens per second": ("", lambda row: float(row["output_tokens_per_s"])),
}


def plot_prefix(path: Path, points: Sequence[PrefixPoint], footnote: str) -> None:
    scenarios = list(dict.fromkeys(point.scenario for point in points))

    def panel(heading: str, unit: str, value: Callable[[dict[str, Any]], float]) -> PlotPanel:
        def draw(axes: Any) -> None:
            axes.set_title(heading)
            axes.set_ylabel(unit)
            for caching, shift, colour in ((False, -0.2, "tab:orange"), (True, 0.2, "tab:blue")):
                values = [value(point.row()) for point in points if point.caching == caching]
                places = [index + shift for index in range(len(scenarios))]
                label = "with prefix caching" if caching else "without"
                axes.bar_label(axes.bar(places, values, 0.4, color=colour, label=label), fmt="%.3g", fontsize=8)
            axes.set_xticks(range(len(scenarios)), scenarios)
            axes.margins(y=0.12)
            axes.legend(fontsize=8)

        return draw

    panels = [panel(heading, unit, value) for heading, (unit, value) in FIGURES.items()]
    save_panels(path, "Prefix caching", footnote, panels)

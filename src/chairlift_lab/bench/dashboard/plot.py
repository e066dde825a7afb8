"""The plot of `chairlift bench dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift_lab.bench.dashboard.run import DashboardCost
from chairlift_lab.report.plots import save_panels


def plot_cost(path: Path, cost: DashboardCost, footnote: str) -> None:
    def draw(axes: Any) -> None:
        for is_open, colour in ((False, "#999999"), (True, "#0072B2")):
            chosen = [index for index, window in enumerate(cost.windows) if window.is_open is is_open]
            heights = [cost.windows[index].tokens_per_s for index in chosen]
            axes.bar(chosen, heights, color=colour, label="page open" if is_open else "page closed")
        axes.set_xlabel("window, in the order of time")
        axes.set_ylabel("output tokens/s")
        error = f" ± {cost.ratio_error:.1%}" if cost.ratio_error is not None else ""
        axes.set_title(f"open: {cost.ratio:.1%}{error} of closed")
        axes.legend(loc="lower right")

    save_panels(path, "The cost of an open dashboard", footnote, [draw])

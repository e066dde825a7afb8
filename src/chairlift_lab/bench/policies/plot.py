"""The plot of `chairlift bench policies`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.policies.run import PolicyPoint
from chairlift_lab.report.plots import PlotPanel, save_panels

TITLES = {"at-once": "All at once", "poisson": "Poisson arrivals"}
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:grey")


def plot_policies(path: Path, points: Sequence[PolicyPoint], footnote: str) -> None:
    save_panels(path, "Batching strategies", footnote, policy_panels(points), columns=3)


def policy_panels(points: Sequence[PolicyPoint]) -> list[PlotPanel]:
    """Throughput, latency and useful tokens, for each kind of arrivals."""
    panels: list[PlotPanel] = []
    for arrivals in dict.fromkeys(point.arrivals for point in points):
        chosen = [point for point in points if point.arrivals == arrivals]
        title = TITLES[arrivals]
        panels += [
            _panel(chosen, f"{title}: throughput", "output tokens/s", "output_tokens_per_s", 1),
            _panel(chosen, f"{title}: p99 latency", "seconds", "latency_p99_ms", 1e-3),
            _panel(chosen, f"{title}: useful tokens", "%", "useful_token_share", 100),
        ]
    return panels


def _panel(points: Sequence[PolicyPoint], title: str, unit: str, key: str, factor: float) -> PlotPanel:
    strategies = list(dict.fromkeys(str(point.strategy) for point in points))
    variations = sorted({point.variation for point in points})
    width = 0.8 / len(strategies)

    def draw(axes: Any) -> None:
        axes.set_title(title)
        axes.set_ylabel(unit)
        for index, strategy in enumerate(strategies):
            rows = {point.variation: point.row() for point in points if str(point.strategy) == strategy}
            places = [place - 0.4 + width * (index + 0.5) for place in range(len(variations))]
            values = [rows[variation][key] * factor for variation in variations]
            bars = axes.bar(places, values, width, color=COLOURS[index % len(COLOURS)], label=strategy)
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(variations)), [f"{variation:g}" for variation in variations])
        axes.set_xlabel("variation of the output lengths (standard deviation / mean)")
        axes.margins(y=0.12)
        axes.legend(fontsize=7)

    return draw

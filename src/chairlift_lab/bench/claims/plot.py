"""The plot of `chairlift bench claims`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.attention.plot import attention_panels
from chairlift_lab.bench.claims.about_chunking import chunking_panel
from chairlift_lab.bench.claims.batch_sizes import BatchSizePoint
from chairlift_lab.bench.claims.run import ClaimsResults
from chairlift_lab.bench.policies.plot import policy_panels
from chairlift_lab.report.plots import PlotPanel, save_panels


def plot_claims(path: Path, results: ClaimsResults, footnote: str) -> None:
    panels: list[PlotPanel] = []
    if results.batch_sizes:
        panels.append(lambda axes: _batch_sizes(axes, results.batch_sizes))
    if results.policies:
        panels += policy_panels(results.policies)
    if results.stalls:
        panels.append(chunking_panel(results.stalls, results.settings.chunked_prompt))
    panels += attention_panels(results.attention)
    if panels:
        save_panels(path, "Published claims, measured", footnote, panels, columns=3)


def _batch_sizes(axes: Any, points: Sequence[BatchSizePoint]) -> None:
    axes.set_title("Requests at a time")
    axes.plot([point.requests for point in points], [point.tokens_per_s for point in points], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks([point.requests for point in points], [f"{point.requests}" for point in points])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests")
    axes.set_ylabel("output tokens/s")

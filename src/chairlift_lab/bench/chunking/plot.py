"""The plot of `chairlift bench chunking`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.bench.chunking.run import ALLOWANCE, ChunkingPoint, chunking_rows
from chairlift_lab.report.plots import PlotPanel, save_panels

_FIXED, _KNEE, _TARGETS = "tab:grey", "tab:green", ("tab:blue", "tab:red", "tab:purple", "tab:orange")


def plot_chunking(path: Path, points: Sequence[ChunkingPoint], footnote: str) -> None:
    rows = chunking_rows(points)
    fixed = sorted((row for row in rows if row["chunk"] is not None), key=lambda row: row["chunk"])
    adaptive = [row for row in rows if row["chunk"] is None]
    targets = [row for row in adaptive if row["target_ms"] is not None]
    colours = {row["name"]: _TARGETS[index % len(_TARGETS)] for index, row in enumerate(targets)}

    def scatter(axes: Any, key: str, scale: float) -> None:
        """Every setting by its inter-token time; fixed chunks are joined by a line."""
        x, y = [row["itl_p99_ms"] for row in fixed], [row[key] * scale for row in fixed]
        axes.plot(x, y, "o-", color=_FIXED, label="fixed chunks")
        for row, one_x, one_y in zip(fixed, x, y, strict=True):
            axes.annotate(str(row["chunk"]), (one_x, one_y), (3, 5), textcoords="offset points", fontsize=7)
        for row in adaptive:
            place = [row["itl_p99_ms"]], [row[key] * scale]
            axes.plot(*place, "*", markersize=13, color=colours.get(row["name"], _KNEE), label=row["name"])
        for row in targets:
            axes.axvline(ALLOWANCE * row["target_ms"], color=colours[row["name"]], linestyle=":", linewidth=1)
        _plain_logarithm(axes)
        axes.set_xlabel(f"inter-token time, 99th percentile, ms (dotted: {ALLOWANCE:g} x target)")
        axes.legend(fontsize=8)

    def throughput(axes: Any) -> None:
        axes.set_title("Throughput")
        axes.set_ylabel("tokens/s, prompts and outputs")
        scatter(axes, "tokens_per_s", 1.0)
        axes.set_ylim(bottom=0)

    def first_token(axes: Any) -> None:
        axes.set_title("Time to first token of the long prompts")
        axes.set_ylabel("seconds, median")
        scatter(axes, "ttft_p50_ms", 1e-3)
        axes.set_ylim(bottom=0)

    def distribution(axes: Any) -> None:
        axes.set_title("Inter-token times of running requests")
        for point in points:
            gaps = sorted(point.run.gaps)
            shares = [(index + 1) / len(gaps) for index in range(len(gaps))]
            kind = {"color": _FIXED, "linewidth": 0.8} if point.chunk else {"color": colours.get(point.name, _KNEE)}
            axes.plot([gap * 1e3 for gap in gaps], shares, **kind, label=None if point.chunk else point.name)
        _plain_logarithm(axes)
        axes.set_xlabel("ms (grey: fixed chunks)")
        axes.set_ylabel("share of tokens that came faster")
        axes.legend(fontsize=8)

    def decisions(axes: Any) -> None:
        axes.set_title("Prompt tokens of each step")
        for point in points:
            if point.chunk is None:
                chunks = [step.prefill_tokens for step in point.run.steps]
                colour = colours.get(point.name, _KNEE)
                axes.plot(chunks, ".-", color=colour, linewidth=0.7, markersize=3, label=point.name)
        axes.set_xlabel("step")
        axes.legend(fontsize=8)

    panels: list[PlotPanel] = [throughput, first_token, distribution, decisions]
    save_panels(path, "Prompt chunks beside decoding requests", footnote, panels)


def _plain_logarithm(axes: Any) -> None:
    """Numbers such as 20, 50 and 100 below a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())

"""Plots with several panels, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter

PlotPanel = Callable[[Any], None]
"""Draws into one matplotlib axes."""


def require_matplotlib(parameter: str = "plot") -> None:
    """Raise, with the parameter that asks for a picture, before the work if it could not be drawn."""
    if find_spec("matplotlib") is None:
        raise InvalidParameter(parameter, "drawing needs matplotlib; install chairlift[bench]")


def save_panels(path: Path, title: str, footnote: str, panels: list[PlotPanel], *, columns: int = 2) -> None:
    """One picture with a panel for each of `panels`, in reading order."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.0 * columns, 3.9 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel(footnote, fontsize=7, color="grey")
    for index, draw in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        draw(axes)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise InvalidParameter("plot", f"cannot write {str(path)!r} ({error})") from None

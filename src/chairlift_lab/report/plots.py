"""Pictures with several panels, by matplotlib; a `Plot` is a panel declared by what of each row it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


Value = str | Callable[[Any], Any]
"""A key of the rows, or a function of a row."""

COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:grey")


def picture(title: str, panels: Sequence[PlotPanel], *, columns: int = 2) -> Callable[[Path, str], None]:
    """Draws the panels into a file, in reading order."""

    def draw(path: Path, footnote: str) -> None:
        save_panels(path, title, footnote, list(panels), columns=columns)

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A panel of bars side by side, or of lines; it draws itself into matplotlib's axes."""

    title: str
    rows: Sequence[Any]
    x: Value
    y: Value | Mapping[str, Value]  # one height, or several by label
    series: Value | None = None  # rows with different values of it get bars or lines of their own
    lines: bool = False
    factor: float = 1.0  # The heights are multiplied with it.
    x_label: str = ""
    y_label: str = ""
    log: str = ""  # the axes with a logarithmic scale: "x", "y" or "xy"
    level: float | None = None  # a horizontal line
    limits: tuple[float | None, float | None] = (None, None)  # The ends of the vertical axis.
    colours: Sequence[str] = COLOURS
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # arguments of matplotlib, by label
    form: str = "%.3g"  # The format of the figures above bars.
    rotation: float = 0.0  # Degrees by which the labels of the horizontal axis turn.

    def __call__(self, axes: Any) -> None:
        values = self._values()
        ticks = list(dict.fromkeys(x for points in values.values() for x in points))
        axes.set_title(self.title)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        for index, (label, points) in enumerate(values.items()):
            style = {"label": label, "color": self.colours[index % len(self.colours)]} | dict(
                self.styles.get(label, {})
            )
            if self.lines:
                # A height of 0 has no place on a logarithmic scale.
                shown = {x: y for x, y in points.items() if y is not None and (y or "y" not in self.log)}
                axes.plot(list(shown), list(shown.values()), **({"marker": "o"} | style))
            else:
                width = 0.8 / len(values)
                places = [ticks.index(x) - 0.4 + width * (index + 0.5) for x in points]
                axes.bar_label(axes.bar(places, list(points.values()), width, **style), fmt=self.form, fontsize=8)
        if "x" in self.log:
            axes.set_xscale("log", base=2)
        if "y" in self.log:
            axes.set_yscale("log")
        names = [x if isinstance(x, str) else f"{x:,g}" for x in ticks]
        axes.set_xticks(ticks if self.lines else range(len(ticks)), names, rotation=self.rotation, fontsize=8)
        axes.margins(y=0.12)
        axes.set_ylim(*self.limits)
        if self.level is not None:
            axes.axhline(self.level, color="grey", linewidth=1)
        if len(values) > 1:
            axes.legend(fontsize=7)

    def _values(self) -> dict[str, dict[Any, Any]]:
        """The heights by label and place on the horizontal axis."""
        heights = self.y if isinstance(self.y, Mapping) else {"": self.y}
        values: dict[str, dict[Any, Any]] = {}
        for row in self.rows:
            for name, height in heights.items():
                parts = [] if self.series is None else [f"{_read(row, self.series)}"]
                y = _read(row, height)
                points = values.setdefault(", ".join([name, *parts] if name else parts), {})
                points[_read(row, self.x)] = None if y is None else y * self.factor
        return values


def _read(row: Any, value: Value) -> Any:
    return row[value] if isinstance(value, str) else value(row)

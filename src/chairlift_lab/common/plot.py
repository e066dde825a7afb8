"""Panels of pictures, declared by what of each row they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift_lab.report.options import Draw
from chairlift_lab.report.plots import PlotPanel, save_panels

Value = str | Callable[[Any], Any]
"""A key of the rows, or a function of a row."""

COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:grey")


def picture(title: str, panels: Sequence[PlotPanel], *, columns: int = 2) -> Draw:
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

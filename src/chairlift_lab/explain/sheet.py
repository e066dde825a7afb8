"""A matplotlib figure that counts everything drawn on it, so that tests can compare it with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift_lab.explain.palette import Look, Theme

GAP = 0.06  # between two cells, so that they can be counted by eye
DPI = 110


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise InvalidParameter("topic", "drawing needs matplotlib; install chairlift[bench]")


class Panel:
    """One part of a sheet; cells are counted by kind in `drawn`."""

    def __init__(self, sheet: Sheet, axes: Any, name: str) -> None:
        self.sheet = sheet
        self.axes = axes
        self.name = name
        self.theme = sheet.theme
        self.drawn: Counter[str] = Counter()
        axes.set_facecolor("none")

    def title(self, text: str, note: str = "") -> None:
        self.axes.set_title(text, loc="left", fontweight="bold", fontsize=10.5, color=self.theme.ink)
        if note:
            self.axes.set_title(note, loc="right", fontsize=9, color=self.theme.muted)

    def cell(
        self,
        x: float,
        y: float,
        kind: str,
        label: str = "",
        *,
        width: float = 1,
        height: float = 1,
        look: Look | None = None,
        size: float = 7.5,
        gap: float = GAP,
    ) -> None:
        """Draw a box with its upper left corner at (x, y), y growing downwards."""
        from matplotlib.patches import Rectangle

        look = look or self.theme.look(kind)
        self.drawn[kind] += 1
        box = Rectangle(
            (x + gap / 2, y + gap / 2),
            width - gap,
            height - gap,
            facecolor=look.fill,
            edgecolor=(look.edge or self.theme.background) if look.hatch or look.edge else look.fill,
            hatch=look.hatch or None,
            linewidth=0.6 if look.hatch or look.edge else 0.0,
        )
        self.axes.add_patch(box)
        if label:
            self.text(x + width / 2, y + height / 2, label, color=look.ink, size=size)

    def bar(self, x: float, y: float, width: float, kind: str, label: str = "") -> None:
        """Draw a cell of any width with the usual gap at its sides."""
        look = self.theme.look(kind)
        self.drawn[kind] += 1
        self.axes.barh(
            y + 0.5, width, 0.86, left=x, color=look.fill, edgecolor=self.theme.background, linewidth=1.0, zorder=2
        )
        if label:
            self.text(x + width / 2, y + 0.5, label, color=look.ink, zorder=3)

    def heat(self, values: Sequence[Sequence[float]], kind: str, *, colours: str = "PuOr", most: float = 0.0) -> None:
        """Draw numbers as colours, from -most to most or from 0 to most, depending on the colour map."""
        most = most or max(abs(value) for row in values for value in row) or 1.0
        least = -most if colours in ("PuOr", "RdBu") else 0.0
        self.drawn[kind] += sum(len(row) for row in values)
        self.axes.imshow(
            values,
            cmap=colours,
            vmin=least,
            vmax=most,
            aspect="auto",
            interpolation="nearest",
            extent=(0, len(values[0]), len(values), 0),
        )

    def text(self, x: float, y: float, words: str, *, color: str | None = None, size: float = 8, **options: Any) -> Any:
        options = {"ha": "center", "va": "center"} | options
        return self.axes.text(x, y, words, color=color or self.theme.ink, fontsize=size, **options)

    def grid_only(self, width: float, height: float, *, equal: bool = True) -> None:
        """Show cells from (0, 0) to (width, height) and no axes around them."""
        self.axes.set_xlim(-0.1, width + 0.1)
        self.axes.set_ylim(height + 0.1, -0.1)
        if equal:
            self.axes.set_aspect("equal")
        for spine in self.axes.spines.values():
            spine.set_visible(False)
        self.axes.tick_params(length=0, colors=self.theme.muted, labelsize=8)

    def chart(self, xlabel: str, ylabel: str) -> None:
        """Style a panel with axes."""
        self.axes.set_xlabel(xlabel, color=self.theme.muted, fontsize=9)
        self.axes.set_ylabel(ylabel, color=self.theme.muted, fontsize=9)
        self.axes.tick_params(colors=self.theme.muted, labelsize=8)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.spines[["left", "bottom"]].set_color(self.theme.hidden)
        self.axes.grid(axis="y", color=self.theme.faint, linewidth=0.8)
        self.axes.set_axisbelow(True)

    def row_names(self, names: Sequence[str], *, size: float = 8) -> None:
        self.axes.set_yticks([index + 0.5 for index in range(len(names))], names, fontsize=size, color=self.theme.ink)

    def column_names(self, names: Sequence[str], *, top: bool = False, size: float = 8, rotation: float = 0) -> None:
        places = [index + 0.5 for index in range(len(names))]
        self.axes.set_xticks(places, names, fontsize=size, color=self.theme.ink, rotation=rotation)
        if top:
            self.axes.xaxis.tick_top()


class Sheet:
    """A picture: a title, panels, and a legend of the kinds that were drawn."""

    def __init__(self, theme: Theme, title: str, *, size: tuple[float, float]) -> None:
        require_matplotlib()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self.theme = theme
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.04, wspace=0.04)
        self.figure = Figure(figsize=size, layout=layout, facecolor=theme.background)
        FigureCanvasAgg(self.figure)
        self.figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=13, color=theme.ink)
        self.panels: dict[str, Panel] = {}

    def panel(self, name: str, place: Any) -> Panel:
        """Add a panel at a cell of `grid`, or anything that add_subplot takes."""
        panel = Panel(self, self.figure.add_subplot(place), name)
        self.panels[name] = panel
        return panel

    def grid(self, rows: int, columns: int, **options: Any) -> Any:
        return self.figure.add_gridspec(rows, columns, **options)

    @property
    def drawn(self) -> dict[str, dict[str, int]]:
        """Number of cells of each kind, by panel."""
        return {name: dict(panel.drawn) for name, panel in self.panels.items()}

    def legend(self, meanings: dict[str, str], also: Sequence[tuple[Look, str]] = (), *, columns: int = 4) -> None:
        """Add the legend, without kinds that were not drawn."""
        from matplotlib.patches import Patch

        drawn = {kind for panel in self.panels.values() for kind, count in panel.drawn.items() if count}
        shown = [(self.theme.look(kind), meaning) for kind, meaning in meanings.items() if kind in drawn]
        patches = []
        for look, meaning in (*shown, *also):
            edge = look.edge or (self.theme.hidden if look.fill == self.theme.background else look.fill)
            patches.append(Patch(facecolor=look.fill, edgecolor=edge, hatch=look.hatch or None, label=meaning))
        self.figure.legend(
            handles=patches,
            loc="outside lower left",
            ncols=min(len(patches), columns),
            frameon=False,
            fontsize=9,
            labelcolor=self.theme.ink,
            handlelength=1.2,
            handleheight=1.0,
            columnspacing=1.8,
        )

    def sign(self, note: str) -> None:
        """Write a note into the upper right corner."""
        self.figure.text(0.99, 0.985, note, ha="right", va="top", fontsize=7.5, color=self.theme.muted)

    def save(self, target: Path | BytesIO, *, kind: str = "png", dpi: int = DPI) -> None:
        from matplotlib import rc_context

        # Without a date or a version, the same run gives the same file.
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        with rc_context({"svg.hashsalt": "chairlift", "hatch.linewidth": 0.7}):
            self.figure.savefig(target, format=kind, dpi=dpi, metadata=metadata, facecolor=self.theme.background)
        self.figure.set_layout_engine("none")  # the layout is final; computing it again takes longer than drawing

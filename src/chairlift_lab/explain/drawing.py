"""What all pictures are drawn with: one set of looks, and a figure that counts everything drawn on it for the tests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift_lab.report.options import require_matplotlib

GAP = 0.06  # Two cells are this far apart, so that they can be counted by eye.
DPI = 110

# Distinguishable for colour-blind readers, after Okabe and Ito.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PINK, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, PALE_INK = "#1c2430", "#ffffff"
BACKGROUND = "#ffffff"
MUTED = "#5b6673"  # less important words, lines and ticks
FAINT = "#e9edf2"  # empty cells
HIDDEN = "#a9b4c0"  # lines of a hatch


@dataclass(frozen=True, slots=True)
class Look:
    """Fill, hatch and ink of one kind of cell. Hatches carry the same information as colours."""

    fill: str
    ink: str = INK  # the colour of text on it
    hatch: str = ""
    edge: str | None = None  # the colour of the hatch; the background's if None

    @classmethod
    def shade(cls, colours: str, share: float) -> Look:
        """A colour of one of matplotlib's maps, from 0 to 1, with an ink that can be read on it."""
        import matplotlib
        from matplotlib.colors import to_hex

        red, green, blue, _ = colour = matplotlib.colormaps[colours](share)
        bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.55
        return cls(to_hex(colour), INK if bright else PALE_INK)


_EMPTY, _BLUE, _GREEN, _RED = Look(FAINT, MUTED), Look(BLUE, PALE_INK), Look(GREEN, PALE_INK), Look(RED, PALE_INK)
_LOOKS = {
    **dict.fromkeys(("empty", "skipped", "masked", "free"), _EMPTY),
    **dict.fromkeys(("prefill", "new", "query"), _BLUE),
    **dict.fromkeys(("decode", "key", "held"), Look(ORANGE)),
    **dict.fromkeys(("cached", "useful", "shared", "accepted"), _GREEN),
    **dict.fromkeys(("recomputed", "rejected"), _RED),
    **dict.fromkeys(("own", "loaded"), Look(SKY)),
    "copied": Look(PINK),
    "reusable": Look("#d3f0e6", INK, "", GREEN),
    "idle": Look(BACKGROUND, MUTED, "////", RED),
    "blocked": Look(BACKGROUND, MUTED, "....", RED),
    "padding": Look(FAINT, MUTED, "xxxx", HIDDEN),
}
_OWNERS = (Look(SKY), Look(ORANGE), _GREEN, Look(PINK), _BLUE, _RED, Look(YELLOW))


def look_of(kind: str) -> Look:
    """The look of a kind of cell."""
    if kind not in _LOOKS:
        raise InvalidParameter("kind", f"{kind!r} has no look; known: {', '.join(_LOOKS)}")
    return _LOOKS[kind]


def owner_look(index: int) -> Look:
    """The look of what belongs to request number `index`."""
    return _OWNERS[index % len(_OWNERS)]


class Panel:
    """One part of a sheet; what is drawn is counted by kind in `drawn`."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.drawn: Counter[str] = Counter()
        axes.set_facecolor("none")

    def title(self, text: str, note: str = "") -> None:
        self.axes.set_title(text, loc="left", fontweight="bold", fontsize=10.5, color=INK)
        if note:
            self.axes.set_title(note, loc="right", fontsize=9, color=MUTED)

    # ---- cells ---------------------------------------------------------------------------------------------------

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

        look = look or look_of(kind)
        self.drawn[kind] += 1
        box = Rectangle(
            (x + gap / 2, y + gap / 2),
            width - gap,
            height - gap,
            facecolor=look.fill,
            edgecolor=(look.edge or BACKGROUND) if look.hatch or look.edge else look.fill,
            hatch=look.hatch or None,
            linewidth=0.6 if look.hatch or look.edge else 0.0,
        )
        self.axes.add_patch(box)
        if label:
            self.text(x + width / 2, y + height / 2, label, color=look.ink, size=size)

    def bar(self, x: float, y: float, width: float, kind: str, label: str = "") -> None:
        """Draw a cell of any width with the usual gap at its sides."""
        look = look_of(kind)
        self.drawn[kind] += 1
        style = {"color": look.fill, "edgecolor": BACKGROUND, "linewidth": 1.0, "zorder": 2}
        self.axes.barh(y + 0.5, width, 0.86, left=x, **style)
        if label:
            self.text(x + width / 2, y + 0.5, label, color=look.ink, zorder=3)

    def heat(self, values: Sequence[Sequence[float]], kind: str, most: float) -> None:
        """Draw numbers as colours, from -most to most."""
        self.drawn[kind] += sum(map(len, values))
        extent = (0, len(values[0]), len(values), 0)
        style = {"cmap": "PuOr", "aspect": "auto", "interpolation": "nearest"}
        self.axes.imshow(values, vmin=-most, vmax=most, extent=extent, **style)

    def text(self, x: float, y: float, words: str, *, color: str = INK, size: float = 8, **options: Any) -> None:
        self.axes.text(x, y, words, color=color, fontsize=size, **({"ha": "center", "va": "center"} | options))

    def frame(self, x: float, y: float, width: float, height: float, color: str = INK, linewidth: float = 1.2) -> None:
        """Draw a box without a fill around cells."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=color, linewidth=linewidth))

    def arrow(self, begin: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
        from matplotlib.patches import FancyArrowPatch

        self.axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", **style))

    def grid_only(
        self,
        width: float,
        height: float,
        *,
        equal: bool = True,
        margin: float = 0.1,
        left: float = 0.0,
        above: float = 0.0,
    ) -> None:
        """Show cells from (0, 0) to (width, height) without axes; rows and columns have no names yet."""
        self.axes.set_xlim(-max(margin, left), width + margin)
        self.axes.set_ylim(height + margin, -max(margin, above))
        if equal:
            self.axes.set_aspect("equal")
        self.axes.spines[:].set_visible(False)
        self.axes.tick_params(length=0, colors=MUTED, labelsize=8)
        self.axes.set_xticks([])
        self.axes.set_yticks([])

    def row_names(self, names: Sequence[str], *, size: float = 8) -> None:
        self.axes.set_yticks([index + 0.5 for index in range(len(names))], names, fontsize=size, color=INK)

    def column_names(self, names: Sequence[str], *, size: float = 8, rotation: float = 0) -> None:
        places = [index + 0.5 for index in range(len(names))]
        self.axes.set_xticks(places, names, fontsize=size, color=INK, rotation=rotation)

    def names_above(self, places: Sequence[float], names: Sequence[str], **style: Any) -> None:
        """Name places on the x axis above the panel."""
        self.axes.set_xticks(places, names, **style)
        self.axes.xaxis.tick_top()
        self.axes.tick_params(axis="x", length=0)

    def axis_names(self, x: str, y: str) -> None:
        self.axes.set_xlabel(x, color=MUTED)
        self.axes.set_ylabel(y, color=MUTED)

    # ---- charts --------------------------------------------------------------------------------------------------

    def chart(self, xlabel: str, ylabel: str) -> None:
        """Style a panel with axes."""
        self.axes.set_xlabel(xlabel, color=MUTED, fontsize=9)
        self.axes.set_ylabel(ylabel, color=MUTED, fontsize=9)
        self.axes.tick_params(colors=MUTED, labelsize=8)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.spines[["left", "bottom"]].set_color(HIDDEN)
        self.axes.grid(axis="y", color=FAINT, linewidth=0.8)
        self.axes.set_axisbelow(True)

    def column(self, x: float, counts: Mapping[str, int], width: float) -> None:
        """Draw a column of tokens, the first kind at its bottom."""
        bottom = 0
        for kind, count in counts.items():
            look = look_of(kind)
            style = {"hatch": look.hatch, "edgecolor": look.edge, "lw": 0} if look.hatch else {}
            self.axes.bar(x, count, width, bottom=bottom, color=look.fill, **style)
            self.drawn[kind] += count
            bottom += count

    def measures(self, values: Mapping[str, float], form: str, colors: Any, *, size: float = 9) -> None:
        """Draw a chart of horizontal bars with their names and, written by `form`, their values."""
        bars = self.axes.barh(range(len(values)), list(values.values()), 0.6, color=colors)
        self.axes.bar_label(bars, [form.format(value) for value in values.values()], color=INK, fontsize=size)
        self.axes.grid(visible=False)
        self.axes.set_yticks(range(len(values)), list(values), color=INK, fontsize=size)
        self.axes.invert_yaxis()
        self.axes.margins(x=0.2)


PICTURES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("pictures.json").read_text(encoding="utf-8"))


class Sheet:
    """A picture: a title, panels, and a legend of the kinds that were drawn, as declared in pictures.json."""

    def __init__(self, name: str, *, least_height: float = 0.0, **values: Any) -> None:
        """`values` are filled into the title and the legend."""
        require_matplotlib("topic")
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self._declared, self._values = PICTURES[name], values
        width, height = self._declared["size"]
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.04, wspace=0.04)
        self.figure = Figure(figsize=(width, max(height, least_height)), layout=layout, facecolor=BACKGROUND)
        FigureCanvasAgg(self.figure)
        title = self._declared["title"].format(**values)
        self.figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=13, color=INK)
        self.panels: dict[str, Panel] = {}
        self.also: Sequence[tuple[Look, str]] = ()  # further entries of the legend

    def panel(self, name: str, place: Any = 111) -> Panel:
        """Add a panel at a cell of `grid`; without one it fills the sheet."""
        self.panels[name] = Panel(self.figure.add_subplot(place))
        return self.panels[name]

    def grid(self, rows: int, columns: int, **options: Any) -> Any:
        return self.figure.add_gridspec(rows, columns, **options)

    @property
    def drawn(self) -> dict[str, dict[str, int]]:
        """Number of cells of each kind, by panel."""
        return {name: dict(panel.drawn) for name, panel in self.panels.items()}

    def finish(self, note: str) -> None:
        """Add the legend, without kinds that were not drawn, and write a note into the upper right corner."""
        from matplotlib.patches import Patch

        drawn = {kind for panel in self.panels.values() for kind, count in panel.drawn.items() if count}
        meanings = self._declared["legend"].items()
        shown = [(look_of(kind), meaning.format(**self._values)) for kind, meaning in meanings if kind in drawn]
        patches = []
        for look, meaning in (*shown, *self.also):
            edge = look.edge or (HIDDEN if look.fill == BACKGROUND else look.fill)
            patches.append(Patch(facecolor=look.fill, edgecolor=edge, hatch=look.hatch or None, label=meaning))
        self.figure.legend(
            handles=patches,
            loc="outside lower left",
            ncols=min(len(patches), self._declared.get("columns", 4)),
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            handlelength=1.2,
            handleheight=1.0,
            columnspacing=1.8,
        )
        self.figure.text(0.99, 0.985, note, ha="right", va="top", fontsize=7.5, color=MUTED)

    def save(self, path: Path) -> None:
        """Write the picture in the format of the path's suffix."""
        from matplotlib import rc_context

        # Without a date or a version, the same run gives the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with rc_context({"svg.hashsalt": "chairlift", "hatch.linewidth": 0.7}):
            self.figure.savefig(path, dpi=DPI, metadata=metadata, facecolor=BACKGROUND)
        self.figure.set_layout_engine("none")  # the layout is final; computing it again takes longer than drawing

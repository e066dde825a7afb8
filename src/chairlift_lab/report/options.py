"""What benches have in common: the JSON they write, --json and --plot, checked settings, lists of values, pictures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from chairlift import __version__
from chairlift.errors import InvalidParameter
from chairlift.options import Check, above, at_least


def write_report(
    path: Path, bench: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write the report of `bench` and return it.

    The shape is the same for all benches:

    | key | meaning |
    |---|---|
    | `bench` | which one |
    | `machine` | where it ran, see `machine` |
    | `settings` | the settings, with defaults |
    | `rows` | one object for each engine or setting compared, with a `name` |
    """
    report = {"bench": bench, "machine": machine(), "settings": dict(settings), "rows": [dict(row) for row in rows]}
    try:
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("json", f"cannot write {str(path)!r} ({error.strerror})") from None
    return report


def check_writable(path: Path, parameter: str = "json") -> None:
    """Raise before the measurement if the file cannot be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidParameter(parameter, f"cannot write {str(path)!r}; give a file in a folder that you may write to")


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "chairlift": __version__,
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    parts = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB",
        facts["gpu"] or "no GPU",
        f"Python {facts['python']}",
        f"torch {facts['torch']}",
        f"transformers {facts['transformers']}",
        f"chairlift {facts['chairlift']}",
    ]
    return " · ".join(parts)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


Draw = Callable[[Path, str], None]
"""Draws the figures into a file; the second argument is a line about the machine, for the foot of the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOptions:
    """Where to write the figures of a command that draws nothing."""

    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures to this file (keys: docs/bench-json.md)."),
    ] = None

    def check(self) -> None:
        """Raise before the measurement if its figures could not be written."""
        if self.json_file is not None:
            check_writable(self.json_file)

    def write(
        self,
        bench: str,
        settings: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        draw: Draw | None = None,
    ) -> None:
        """Print a line about the machine and write what was asked for."""
        Console().print(machine_line(machine()), style="dim", highlight=False)
        if self.json_file is not None:
            write_report(self.json_file, bench, settings, rows)
        self.draw(draw)

    def draw(self, draw: Draw | None) -> None:
        """Draw the figures, for commands that can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(JsonOptions):
    """Where to write and to draw the figures."""

    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Plot the figures: .png, .svg or .pdf (needs matplotlib)."),
    ] = None

    def check(self) -> None:
        JsonOptions.check(self)
        if self.plot is not None:
            require_matplotlib()
            check_writable(self.plot, parameter="plot")
            if self.plot.suffix not in (".png", ".svg", ".pdf"):
                raise InvalidParameter("plot", f"must end in .png, .svg or .pdf, got {str(self.plot)!r}")

    def draw(self, draw: Draw | None) -> None:
        if self.plot is not None and draw is not None:
            draw(self.plot, machine_line(machine()))


# ---- settings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a bench, as options: a field whose annotation has a check, such as `Count`, is checked by it."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, parts = getattr(self, name), getattr(hint, "__metadata__", ())
            flags = [flag for part in parts for flag in getattr(part, "param_decls", None) or ()]
            option = next((flag for flag in flags if flag.startswith("--")), name)
            for check in filter(callable, parts):
                if value is not None:
                    check(option.removeprefix("--").replace("-", "_"), value)


def each(check: Check) -> Check:
    """Check every value of a list, which must not be empty."""

    def check_all(parameter: str, values: Sequence[Any]) -> None:
        if not values:
            raise InvalidParameter(parameter, "must have at least one number")
        for value in values:
            check(parameter, value)

    return check_all


Count = Annotated[int, at_least(1)]
Counts = Annotated[Sequence[int], each(at_least(1))]
Positive = Annotated[float, above(0)]


# ---- lists ---------------------------------------------------------------------------------------------------------


def number_list(
    help: str, *names: str, kind: Callable[[str], Any] = int, panel: str | None = None, default: str | None = None
) -> Any:
    """A typer option for numbers such as 1,4,16; `default` is what the help shows as its default."""

    def numbers(value: Any) -> Any:
        return tuple(_parse(value, kind)) if isinstance(value, str) else value

    return typer.Option(
        *names, help=help, metavar="N[,N…]", parser=numbers, rich_help_panel=panel, show_default=default or True
    )


def parse_numbers(parameter: str, text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """ "1,4,16" -> [1, 4, 16]."""
    try:
        return _parse(text, kind)
    except ValueError as error:
        raise InvalidParameter(parameter, str(error)) from None


def parse_names(parameter: str, text: str, choices: Collection[str]) -> list[str]:
    """ "chat, rag" -> ["chat", "rag"]; each must be one of `choices` and occur once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in choices:
            raise InvalidParameter(parameter, f"there is no {name!r}; choose from {', '.join(choices)}")
    if len(set(names)) < len(names):
        raise InvalidParameter(parameter, f"{text!r} names one twice")
    return names


def _parse(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"must be numbers separated by commas, got {text!r}") from None


# ---- pictures with several panels, by matplotlib --------------------------------------------------------------------

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

"""What the benches share on the command line: where results go, how they look, and a sign of life meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from chairlift.errors import InvalidParameter
from chairlift.lab.common.plots import require_matplotlib
from chairlift.lab.common.report import check_writable, machine, machine_line, write_report

if TYPE_CHECKING:
    from chairlift.lab.common.timing import Note


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Where to leave the figures."""

    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures there (keys: docs/bench-json.md)."),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw them there: .png, .svg or .pdf (needs matplotlib)."),
    ] = None

    def check(self) -> None:
        """Raise now rather than after minutes of measuring."""
        if self.json_file is not None:
            check_writable(self.json_file)
        if self.plot is not None:
            require_matplotlib()
            check_writable(self.plot, parameter="plot")
            if self.plot.suffix not in (".png", ".svg", ".pdf"):
                raise InvalidParameter("plot", f"must end in .png, .svg or .pdf, got {str(self.plot)!r}")

    def write(
        self,
        bench: str,
        settings: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        draw: Callable[[Path, str], None],
    ) -> None:
        """`draw` is called with the file and the line that says where this was measured."""
        here = machine_line(machine())
        Console().print(here, style="dim", highlight=False)
        if self.json_file is not None:
            write_report(self.json_file, bench, settings, rows)
        if self.plot is not None:
            draw(self.plot, here)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOptions:
    """Where to leave the figures of a bench that draws nothing."""

    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures there (keys: docs/bench-json.md)."),
    ] = None

    def check(self) -> None:
        """Raise now rather than after minutes of measuring."""
        if self.json_file is not None:
            check_writable(self.json_file)

    def write(self, bench: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        Console().print(machine_line(machine()), style="dim", highlight=False)
        if self.json_file is not None:
            write_report(self.json_file, bench, settings, rows)


@contextmanager
def watch(*, enabled: bool) -> Iterator[Note]:
    """Say what is being measured."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = enabled and sys.stderr.isatty()
    with Progress(*columns, console=Console(file=sys.stderr), disable=not shown, transient=True) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """The first column holds names, the others figures. Where room is short headings wrap, and then names; figures
    never do. What cannot fit even so is printed wider than the terminal: better broken lines than columns gone."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, caption=caption, caption_justify="left")
    cells = [list(row) for row in rows]
    console = Console()
    widths, total = _column_widths(headings, cells, console.width)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        table.add_column(heading, justify="right" if index else "left", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.width = max(console.width, total)
    console.print(table)


def _column_widths(headings: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> tuple[list[int], int]:
    """Of the columns, and of all the table. What is left beyond the least that each needs goes to the names first."""
    least, most = [], []
    for index, heading in enumerate(headings):
        cells = [row[index] for row in rows]
        unbroken = [*heading.split(), *(cells if index else " ".join(cells).split())]
        least.append(max(map(cell_len, unbroken), default=1))
        most.append(max(map(cell_len, [*heading.split("\n"), *cells]), default=1))
    between = 3 * len(headings) + 1
    spare = max(0, room - between - sum(least))
    widths = []
    for few, many in zip(least, most, strict=True):
        more = min(spare, max(0, many - few))
        spare -= more
        widths.append(few + more)
    return widths, between + sum(widths)


def show_comparison(rows: Iterable[Mapping[str, Any]]) -> None:
    """A recorded run beside the simulator's idea of it."""
    show_table(
        "The recorded run, and the same simulated",
        ["", "Measured", "Simulated", "Off by"],
        ([row["name"], f"{row['measured']:,.2f}", f"{row['simulated']:,.2f}", f"{row['error']:+.1%}"] for row in rows),
    )


def parse_numbers(parameter: str, text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """ "1,4,16" -> [1, 4, 16]."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(parameter, f"must be numbers with commas between them, got {text!r}") from None

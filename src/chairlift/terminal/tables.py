"""Tables of figures, on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from chairlift.terminal.console import without_controls

PIPED_WIDTH = 10_000  # columns of what is not a terminal, where lines are not to be broken


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `value` is a key of the rows, or a function that takes a row."""

    heading: str
    value: str | Callable[[Any], Any]
    form: str = ""  # a format specification
    factor: float = 1  # Converts the unit of the rows to that of the heading.
    unit: str = ""  # It stands after the figure.
    missing: str = "-"  # shown for None

    def cell(self, row: Any) -> str:
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        if value is None:
            return self.missing
        if isinstance(value, bool):
            return "yes" if value else "no"
        return format(value if self.factor == 1 else value * self.factor, self.form) + self.unit


@dataclass(frozen=True, slots=True)
class Table:
    """Rows shown in columns; the first column holds names."""

    title: str
    columns: Sequence[Column]
    rows: Iterable[Any]
    caption: str = ""

    def show(self) -> None:
        cells = ([column.cell(row) for column in self.columns] for row in self.rows)
        show_table(self.title, [column.heading for column in self.columns], cells, self.caption)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text below the tables."""

    text: str

    def show(self) -> None:
        Console().print(self.text, highlight=False, markup=False, soft_wrap=True)


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """Print a table whose first column holds names and the others figures.

    On a narrow terminal headings wrap first, then names; figures never do. A table that is still too wide is printed
    wider than the terminal: broken lines are better than missing columns.
    """
    table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, caption=caption, caption_justify="left")
    cells = [[without_controls(cell) for cell in row] for row in rows]
    console = output_console()
    widths, total = _column_widths(headings, cells, console.width)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        table.add_column(heading, justify="right" if index else "left", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.width = max(console.width, total)
    print_aligned(console, table)


def output_console() -> Console:
    """A console on standard output, wide enough for every line if that is a pipe or a file, unless COLUMNS is set."""
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPED_WIDTH
    return console


def print_aligned(console: Console, aligned: RenderableType) -> None:
    """Print a table or a grid; in a pipe or a file, lines do not end in spaces."""
    if console.is_terminal:
        console.print(aligned)
        return
    with console.capture() as captured:
        console.print(aligned)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _column_widths(headings: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> tuple[list[int], int]:
    """The widths of the columns and of the table; room beyond the minimum goes to the first columns first."""
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


def comparison_table(rows: Iterable[Any]) -> Table:
    """A recorded run beside its simulation."""
    columns = [
        Column("", "name"),
        Column("Measured", "measured", ",.2f"),
        Column("Simulated", "simulated", ",.2f"),
        Column("Off by", "error", "+.1%"),
    ]
    return Table("The recorded run, and the same simulated", columns, rows)


def recording_table(rows: Iterable[Any]) -> Table:
    """What was measured of a real run, beside two simulations of it."""
    columns = [
        Column("", "name"),
        Column("Measured", "measured", ",.1f"),
        Column("vLLM's policy", "vllm", ",.1f"),
        Column("Off by", "error", "+.1%"),
        Column("Our policy", "chairlift", ",.1f"),
        Column("Change", "change", "+.1%"),
    ]
    caption = "Change: what our policy is predicted to change beside vLLM's on the same machine"
    return Table("The recorded run, and the same simulated", columns, rows, caption)

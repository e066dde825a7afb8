"""The options --json and --plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from chairlift.errors import InvalidParameter
from chairlift_lab.report.json_report import check_writable, machine, machine_line, write_report
from chairlift_lab.report.plots import require_matplotlib

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

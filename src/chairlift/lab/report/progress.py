"""Progress of a measurement, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Note = Callable[[str], None]
"""Called with a few words about what is measured next."""


@contextmanager
def watch(*, enabled: bool) -> Iterator[Note]:
    """Show a spinner with the latest note, if standard error is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = enabled and sys.stderr.isatty()
    with Progress(*columns, console=Console(file=sys.stderr), disable=not shown, transient=True) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)

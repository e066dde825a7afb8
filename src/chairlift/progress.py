"""A progress bar for generation, on standard error if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]
"""Called with the number of open requests and of tokens generated so far."""


@contextmanager
def generation_progress(num_requests: int, *, enabled: bool) -> Iterator[Advance]:
    if not enabled or not sys.stderr.isatty():
        yield lambda num_open, num_tokens: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:  # rich is an optional dependency
        yield lambda num_open, num_tokens: None
        return
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=num_requests, speed="")

        def advance(num_open: int, num_tokens: int) -> None:
            elapsed = progress.tasks[task].elapsed or 0.0
            speed = f"{num_tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            progress.update(task, completed=num_requests - num_open, speed=speed)

        yield advance

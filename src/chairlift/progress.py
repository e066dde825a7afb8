"""Progress of generation, of loading and of measurements, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

log = logging.getLogger("chairlift")

LOG_SECONDS = 10.0  # Lines of a long load are this far apart where there is no terminal.

Advance = Callable[[int, int], None]
"""Called with the number of open requests and of tokens generated so far."""


Note = Callable[[str], None]
"""Called with a few words about what is measured next."""


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


@contextmanager
def watch(*, enabled: bool) -> Iterator[Note]:
    """Show a spinner with the latest note, if standard error is a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


class Shaped(Protocol):
    @property
    def shape(self) -> Any: ...


Tensors = TypeVar("Tensors", bound=Shaped)
Watch = Callable[[Iterable[tuple[str, Tensors]]], Iterator[tuple[str, Tensors]]]
"""Passes a stream of named tensors on and shows how many of the weights are done."""


@contextmanager
def loading_progress(num_weights: int, *, enabled: bool) -> Iterator[Watch[Any]]:
    """A bar on a terminal; elsewhere a line in the log every ten seconds."""
    report, close = _bar(num_weights) if enabled and sys.stderr.isatty() else (_log_lines(num_weights), lambda: None)

    def watch(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        done = 0
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.shape.numel()
            report(min(done, num_weights))

    try:
        yield watch
    finally:
        close()


def _bar(total: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:  # rich is an optional dependency
        return _log_lines(total), lambda: None
    columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task("loading", total=total)
    progress.start()
    return lambda done: progress.update(task, completed=done), progress.stop


def _log_lines(total: int) -> Callable[[int], None]:
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > LOG_SECONDS:
            last = time.monotonic()
            log.info(f"loading    {done / max(1, total):.0%} of the weights")

    return report


class StartTimeline:
    """The phases of an engine's start, and the seconds that each took.

    Phases follow one another without gaps: each begins where the one before has ended.
    """

    def __init__(self, begun: float | None = None) -> None:
        """`begun`: when the first phase began, by `time.monotonic`; now by default."""
        self.seconds: dict[str, float] = {}  # The keys are phases, in order.
        self._last_end = time.monotonic() if begun is None else begun

    def end(self, phase: str) -> None:
        """Count the time since the last phase as `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last_end
        self._last_end = now

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s: {phases}"

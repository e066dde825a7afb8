"""Progress of generation, of loading and of measurements, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

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


class StartStage(NamedTuple):
    """A part of a start that takes long, and how much of it is done."""

    name: str
    done: int
    total: int


LOADING = "loading the weights"
COMPILING = "compiling the CPU kernels, once, about 30 s"  # Later starts read them.
Report = Callable[[StartStage], None]

_reports: list[Report] = []  # The last one is told about the stages of the start that is running.


@contextmanager
def stages_told_to(report: Report) -> Iterator[None]:
    """Call `report` with the stages of a start, again and again, while the block runs."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


@contextmanager
def stages_shown(*, enabled: bool) -> Iterator[None]:
    """Show the stages of a start in this process, unless they are told to another."""
    if _reports or not enabled:
        yield
        return
    display = StageDisplay(log.info)
    try:
        with stages_told_to(display):
            yield
    finally:
        display.close()


def tell_stage(stage: StartStage) -> None:
    if _reports:
        _reports[-1](stage)


class StageDisplay:
    """Shows the stages of a start: a bar on a terminal, and elsewhere a line every ten seconds."""

    def __init__(self, say: Callable[[str], None], *, bars: bool = True) -> None:
        """`say` prints a line where there is no terminal, or are to be no bars."""
        self._say = say
        self._bars = bars and sys.stderr.isatty()
        self._stage = ""
        self._last_line = time.monotonic()
        self._opened = ExitStack()
        self._show_bar: Report | None = None

    def __call__(self, stage: StartStage) -> None:
        if self._bars:
            if self._show_bar is None:
                self._show_bar = self._open_bar()
            self._show_bar(stage)
            return
        begins = stage.name != self._stage
        self._stage, now = stage.name, time.monotonic()
        if (begins and stage.name == COMPILING) or now - self._last_line > LOG_SECONDS:
            self._last_line = now
            self._say(stage.name if begins else f"{stage.name}: {stage.done / max(1, stage.total):.0%}")

    def close(self) -> None:
        """Remove the bar, before anything else is printed."""
        self._opened.close()
        self._show_bar = None

    def _open_bar(self) -> Report:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        except ImportError:  # rich is an optional dependency
            return lambda stage: None
        columns = (TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
        progress = self._opened.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        tasks: dict[str, Any] = {}

        def show(stage: StartStage) -> None:
            if stage.name not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[stage.name] = progress.add_task(stage.name)
            progress.update(tasks[stage.name], completed=stage.done, total=max(1, stage.total))

        return show


class Shaped(Protocol):
    @property
    def shape(self) -> Any: ...


Tensors = TypeVar("Tensors", bound=Shaped)
Watch = Callable[[Iterable[tuple[str, Tensors]]], Iterator[tuple[str, Tensors]]]
"""Passes a stream of named tensors on and shows how many of the weights are done."""


@contextmanager
def loading_progress(num_weights: int, *, enabled: bool) -> Iterator[Watch[Any]]:
    """Passes tensors on, and tells how many of the weights are done."""

    def watch(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        done = 0
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.shape.numel()
            tell_stage(StartStage(LOADING, min(done, num_weights), num_weights))

    with stages_shown(enabled=enabled):
        yield watch


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

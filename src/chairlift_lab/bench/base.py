"""The seam of `chairlift bench`: a bench is a module of this package, or a plugin, that registers a command.

The module `long_context` registers `chairlift bench long-context`. Every bench has the same skeleton:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class LongContextSettings(Settings):          # options that are also the settings of the report, with their checks
        output_tokens: Annotated[int, at_least(2), typer.Option(help="Tokens generated after each prompt.")] = 64

    def measure_long_contexts(started, ceilings, settings, note) -> list[dict[str, Any]]: ...      # the rows

    COLUMNS = (Column("Prompt", "tokens", ","), ...)                                               # what is printed

    @bench("long-context", "chairlift bench long-context --lengths 1024,4096")
    def bench_long_context(engine: EngineOptions, note: Note, settings: LongContextSettings) -> BenchResult: ...

A row is a dictionary with the keys of docs/bench-json.md, and columns and plots name its keys. The parameters of the
command are its options and its docstring is the help. Two parameters are no options: `note` reports progress and
`report` holds the report options. The runner below prints the tables, writes --json and draws --plot.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.progress import watch
from chairlift.registry import Registry
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions
from chairlift_lab.common.workload import LengthRange
from chairlift_lab.report.options import Draw, JsonOptions, Settings

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedEngineOptions(EngineOptions):
    """Engine options of a bench that varies some of them, such as the policy: combinations are checked per engine."""

    def _check_combinations(self) -> None:
        pass


_workload = partial(typer.Option, rich_help_panel="Workload")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(Settings):
    """Requests of random lengths, or those of a file."""

    prompt_len: Annotated[str, _workload(metavar="LOW:HIGH", help="Prompt tokens, log-uniform, or one number.")] = (
        "16:512"
    )
    output_len: Annotated[str, _workload(metavar="LOW:HIGH", help="Output tokens, log-uniform, or one number.")] = (
        "16:256"
    )
    seed: Annotated[int, _workload(help="The same seed gives the same requests.")] = 0
    workload: Annotated[
        Path | None,
        _workload(help='Read the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.'),
    ] = None

    def lengths(self) -> dict[str, LengthRange]:
        return {name: LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len")}


class Shown(Protocol):
    """Prints itself; see `chairlift.terminal.tables.Table`."""

    def show(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a bench found. The keys of `settings` and `rows` are explained in docs/bench-json.md."""

    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    tables: Sequence[Shown] = ()
    draw: Draw | None = None

    def finish(self, bench: str, report: JsonOptions | None) -> None:
        """Print the tables and write the report."""
        for table in self.tables:
            table.show()
        if report is not None:
            report.write(bench, self.settings, self.rows, self.draw)


@dataclass(frozen=True, slots=True)
class Bench:
    """A command of `chairlift bench`."""

    command: Callable[..., None]
    examples: Sequence[str]


BENCHES: Registry[Bench] = Registry("bench", "chairlift_lab.bench")

Measure = Callable[..., BenchResult]


def bench(name: str, *examples: str, report: type[JsonOptions] | None = JsonOptions) -> Callable[[Measure], Measure]:
    """Decorator: make a function the command `chairlift bench NAME`, with `examples` below its help.

    `report` says which report options the command has: `JsonOptions`, `ReportOptions` (also --plot), or none.
    """

    def add(measure: Measure) -> Measure:
        BENCHES.register(name)(Bench(_command(name, measure, report), examples))
        return measure

    return add


def _command(name: str, measure: Measure, report_type: type[JsonOptions] | None) -> Callable[..., None]:
    wanted = inspect.signature(measure, eval_str=True).parameters
    options = [parameter for parameter in wanted.values() if parameter.name not in ("note", "report")]
    if report_type is not None:
        options.append(inspect.Parameter("report", inspect.Parameter.KEYWORD_ONLY, annotation=report_type))
    if "engine" not in wanted and "quiet" not in wanted:  # the engine's options have --quiet
        kind = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter("quiet", kind, default=False, annotation=Quiet))

    def command(**values: Any) -> None:
        report = values.pop("report", None)
        quiet = values["engine"].quiet if "engine" in wanted else values["quiet"]
        if report is not None:
            report.check()
        show_log(quiet=True)
        values = {name: value for name, value in values.items() if name in wanted}
        if "report" in wanted:
            values["report"] = report
        if "note" in wanted:
            with watch(enabled=not quiet) as note:
                result = measure(**values, note=note)
        else:
            result = measure(**values)
        result.finish(name, report)

    command.__doc__ = measure.__doc__
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in options]
    )
    return command


@contextmanager
def progress_bar(name: str, total: float | None, unit: str, *, enabled: bool) -> Iterator[Callable[..., None]]:
    """A bar on standard error; without a total it only moves.

    It is advanced to what is done, with the number of tokens so far and a few words. The speed counts from the last
    moment without a token.
    """
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} " + unit),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    shown = enabled and sys.stderr.isatty()
    console = Console(file=sys.stderr)  # bound now, because loading transformers replaces sys.stderr for a while
    # Drawn rarely, to leave the processors to the load.
    with Progress(*columns, console=console, disable=not shown, refresh_per_second=2) as progress:
        task = progress.add_task(name, total=total, state="loading")
        start_time = time.perf_counter()

        def advance(done: int, tokens: int, words: str = "") -> None:
            nonlocal start_time
            start_time = start_time if tokens else time.perf_counter()
            speed = tokens / max(time.perf_counter() - start_time, 1e-9)
            progress.update(task, completed=done, state=f"{words}{speed:,.0f} tokens/s")

        yield advance

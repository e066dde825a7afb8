"""The progress bar and the tables of `chairlift bench serve`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chairlift_lab.load.figures import LatencyLimits
from chairlift_lab.load.run import LoadProgress

LATENCIES = ("ttft", "tpot", "itl", "e2e")


@contextmanager
def watch_load(name: str, total: int | None, *, enabled: bool) -> Iterator[LoadProgress]:
    """A progress bar for requests; without a total it only moves."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} done"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    shown = enabled and sys.stderr.isatty()
    # Drawn rarely, to leave the processors to the load.
    with Progress(*columns, console=Console(stderr=True), disable=not shown, refresh_per_second=2) as progress:
        task = progress.add_task(name, total=total, state="starting")
        begun = time.perf_counter()

        def advance(done: int, num_open: int, pieces: int) -> None:
            nonlocal begun
            begun = begun if pieces else time.perf_counter()
            speed = pieces / max(time.perf_counter() - begun, 1e-9)
            progress.update(task, completed=done, state=f"{num_open:,} open, {speed:,.0f} tokens/s")

        yield advance


@dataclass(frozen=True, slots=True)
class LoadTables:
    """Throughput and latencies of each run, with a column for each."""

    rows: Sequence[Mapping[str, Any]]
    title: str
    limits: LatencyLimits

    def show(self) -> None:
        console, rows = Console(), self.rows
        console.print(f"\n[bold]{self.title}[/bold]", highlight=False)
        console.print(_throughput(rows, self.limits))
        console.print(_latencies(rows))
        for row in rows:
            _show_errors(console, row)
        if len(rows) == 2:
            ratio = rows[0]["speedup_vs"][rows[1]["name"]]
            console.print(f"{rows[0]['name']} / {rows[1]['name']}: [bold]{ratio:.1%}[/bold] of the output tokens/s")


def _throughput(rows: Sequence[Mapping[str, Any]], limits: LatencyLimits) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(str(row["name"]), justify="right")

    def line(label: str, form: str, *path: str) -> None:
        table.add_row(label, *(_shown(_at(row, path), form) for row in rows))

    table.add_row("requests", *(f"{row['completed']:,} of {row['requests']:,}" for row in rows))
    line("seconds", ",.1f", "seconds")
    line("requests/s", ",.2f", "requests_per_s")
    line("output tokens/s", ",.1f", "output_tokens_per_s")
    line("all tokens/s", ",.1f", "total_tokens_per_s")
    line("prompt tokens", ",d", "input_tokens")
    line("of them cached", ",d", "cached_tokens")
    line("output tokens", ",d", "output_tokens")
    if limits.given:
        line("good requests/s", ",.2f", "goodput_per_s")
        line("good share", ".1%", "goodput_share")
    line("most at a time", ",d", "peak_concurrency")
    line("sent late, p99 ms", ",.1f", "send_lag_p99_ms")
    for role in ("client", "front_end", "engine"):
        if any(role in row["cpu_seconds"] for row in rows):
            line(f"CPU s, {role.replace('_', ' ')}", ",.2f", "cpu_seconds", role)
    return table


def _latencies(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("Latency, ms", box=SIMPLE_HEAD, caption_justify="left")
    table.caption = (
        "TTFT: to the first token · TPOT: per token after it, one figure per request\n"
        "ITL: between two pieces of an answer · E2E: to its end"
    )
    for heading in ("mean", "p50", "p95", "p99"):
        table.add_column(heading, justify="right")
    for name in LATENCIES:
        for row in rows:
            label = f"{name.upper()} {row['name']}" if len(rows) > 1 else name.upper()
            figures = (_shown(row[f"{name}_{figure}_ms"], ",.1f") for figure in ("mean", "p50", "p95", "p99"))
            table.add_row(label, *figures)
    return table


def _show_errors(console: Console, row: Mapping[str, Any]) -> None:
    for error, count in sorted(row["errors"].items(), key=lambda item: -item[1]):
        console.print(f"{row['name']}: {count:,} failed: {error}", style="red", highlight=False, markup=False)


def _at(row: Any, path: Sequence[str]) -> Any:
    for key in path:
        row = row.get(key)
    return row


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

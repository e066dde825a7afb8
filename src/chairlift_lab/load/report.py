"""The progress bar and the tables of `chairlift bench serve`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.terminal.tables import show_table
from chairlift_lab.load.figures import LatencyLimits
from chairlift_lab.load.run import LoadProgress

THROUGHPUT = (
    ("seconds", "seconds", ",.1f"),
    ("requests/s", "requests_per_s", ",.2f"),
    ("output tokens/s", "output_tokens_per_s", ",.1f"),
    ("all tokens/s", "total_tokens_per_s", ",.1f"),
    ("prompt tokens", "input_tokens", ",d"),
    ("of them cached", "cached_tokens", ",d"),
    ("output tokens", "output_tokens", ",d"),
    ("good requests/s", "goodput_per_s", ",.2f"),
    ("good share", "goodput_share", ".1%"),
    ("most at a time", "peak_concurrency", ",d"),
    ("sent late, p99 ms", "send_lag_p99_ms", ",.1f"),
)
SPREAD = ("mean", "p50", "p95", "p99")
LATENCY_CAPTION = (
    "TTFT: to the first token · TPOT: per token after it, one figure per request\n"
    "ITL: between two pieces of an answer · E2E: to its end"
)


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
        show_table("", ["", *(str(row["name"]) for row in rows)], self._throughput())
        show_table("", ["Latency, ms", *SPREAD], self._latencies(), LATENCY_CAPTION)
        for row in rows:
            for error, count in sorted(row["errors"].items(), key=lambda item: -item[1]):
                console.print(f"{row['name']}: {count:,} failed: {error}", style="red", highlight=False, markup=False)
        if len(rows) == 2:
            ratio = rows[0]["speedup_vs"][rows[1]["name"]]
            console.print(f"{rows[0]['name']} / {rows[1]['name']}: [bold]{ratio:.1%}[/bold] of the output tokens/s")

    def _throughput(self) -> Iterator[list[str]]:
        yield ["requests", *(f"{row['completed']:,} of {row['requests']:,}" for row in self.rows)]
        for label, key, form in THROUGHPUT:
            if self.limits.given or key not in ("goodput_per_s", "goodput_share"):
                yield [label, *(_shown(row[key], form) for row in self.rows)]
        for role in ("client", "front_end", "engine"):
            if any(role in row["cpu_seconds"] for row in self.rows):
                seconds = (row["cpu_seconds"].get(role) for row in self.rows)
                yield [f"CPU s, {role.replace('_', ' ')}", *(_shown(value, ",.2f") for value in seconds)]

    def _latencies(self) -> Iterator[list[str]]:
        for name in ("ttft", "tpot", "itl", "e2e"):
            for row in self.rows:
                label = f"{name.upper()} {row['name']}" if len(self.rows) > 1 else name.upper()
                yield [label, *(_shown(row[f"{name}_{figure}_ms"], ",.1f") for figure in SPREAD)]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

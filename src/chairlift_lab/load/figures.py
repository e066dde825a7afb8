"""Figures of a load from the records of its requests, their tables and plot, and the progress bar meanwhile."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.options import above
from chairlift.terminal.tables import show_table
from chairlift_lab.common.engines import percentile
from chairlift_lab.load.client import LoadProgress, LoadRecord, LoadRun
from chairlift_lab.report.options import Settings
from chairlift_lab.report.plots import PlotPanel, save_panels


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one completed request, in seconds."""

    ttft: float
    tpot: float | None  # None for an answer of one token
    e2e: float

    @classmethod
    def of(cls, record: LoadRecord) -> Latency:
        first = record.times[0] if record.times else record.end
        ttft, e2e = first - record.sent, record.end - record.sent
        tpot = (e2e - ttft) / (record.output_tokens - 1) if record.output_tokens > 1 else None
        return cls(ttft, tpot, e2e)


_good = partial(typer.Option, rich_help_panel="What counts as good")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits(Settings):
    """The limits of a good answer, in milliseconds; without limits every answer is good."""

    max_ttft_ms: Annotated[float | None, above(0), _good(help="Longest time to first token of a good answer.")] = None
    max_tpot_ms: Annotated[
        float | None, above(0), _good(help="Longest mean time per output token after the first.")
    ] = None
    max_e2e_ms: Annotated[float | None, above(0), _good(help="Longest time from start to end.")] = None

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.max_ttft_ms, self.max_tpot_ms, self.max_e2e_ms))

    def met_by(self, latency: Latency) -> bool:
        pairs = (
            (latency.ttft, self.max_ttft_ms),
            (latency.tpot, self.max_tpot_ms),
            (latency.e2e, self.max_e2e_ms),
        )
        return all(limit is None or value is None or value * 1e3 <= limit for value, limit in pairs)


def answered(run: LoadRun) -> list[LoadRecord]:
    return [record for record in run.records if record.error is None]


def token_gaps(records: Sequence[LoadRecord]) -> list[float]:
    """Seconds between consecutive pieces of the same answer."""
    return [later - earlier for record in records for earlier, later in pairwise(record.times)]


def in_flight(records: Sequence[LoadRecord]) -> list[tuple[float, int]]:
    """The number of requests in flight, from each moment at which it changed."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    steps, count = [], 0
    for moment, change in changes:  # ends come before starts at the same moment
        count += change
        steps.append((moment, count))
    return steps


def load_row(name: str, runs: Sequence[LoadRun], limits: LatencyLimits) -> dict[str, Any]:
    """The figures of one or several runs together, with the keys of docs/bench-json.md."""
    records = [record for run in runs for record in run.records]
    good_ones = [record for run in runs for record in answered(run)]
    latencies = [Latency.of(record) for record in good_ones]
    seconds = max(sum(run.seconds for run in runs), 1e-9)
    input_tokens, output_tokens = _total(good_ones, "input_tokens"), _total(good_ones, "output_tokens")
    good = sum(limits.met_by(latency) for latency in latencies)
    return {
        "name": name,
        "runs": len(runs),
        "requests": len(records),
        "completed": len(good_ones),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "seconds": seconds,
        "requests_per_s": len(good_ones) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (input_tokens + output_tokens) / seconds,
        "input_tokens": input_tokens,
        "cached_tokens": _total(good_ones, "cached_tokens"),
        "output_tokens": output_tokens,
        "goodput_per_s": good / seconds,
        "goodput_share": good / len(records) if records else None,
        "peak_concurrency": max((count for run in runs for _, count in in_flight(run.records)), default=0),
        "send_lag_p99_ms": _percentile_ms([record.sent - record.due for record in records], 99),
        **_spread("ttft", [latency.ttft for latency in latencies]),
        **_spread("tpot", [latency.tpot for latency in latencies if latency.tpot is not None]),
        **_spread("itl", token_gaps(good_ones)),
        **_spread("e2e", [latency.e2e for latency in latencies]),
        "cpu_seconds": dict(sum((Counter(run.cpu_seconds) for run in runs), Counter[str]())),
    }


def _total(records: Sequence[LoadRecord], name: str) -> int:
    return sum(getattr(record, name) for record in records)


def _spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    spread = {f"{name}_mean_ms": sum(seconds) / len(seconds) * 1e3 if seconds else None}
    return spread | {f"{name}_p{percent}_ms": _percentile_ms(seconds, percent) for percent in (50, 95, 99)}


def _percentile_ms(seconds: list[float], percent: float) -> float | None:
    return percentile(seconds, percent) * 1e3 if seconds else None


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
        start_time = time.perf_counter()

        def advance(done: int, num_open: int, pieces: int) -> None:
            nonlocal start_time
            start_time = start_time if pieces else time.perf_counter()
            speed = pieces / max(time.perf_counter() - start_time, 1e-9)
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


COLOURS = ("#0b6e99", "#d9730d")  # blue and orange: safe for most kinds of colour blindness
RED = "#c4314b"
SLICES = 80  # parts into which the time of a run is divided


Runs = Mapping[str, Sequence[LoadRun]]


def plot_load(path: Path, title: str, note: str, runs: Runs, limits: LatencyLimits) -> None:
    """Six panels, with a colour for each name in `runs`; the panels over time show the first run of each."""
    panels: list[PlotPanel] = [
        lambda axes: _draw_latencies(axes, runs, "ttft", "Time to first token", limits.max_ttft_ms),
        lambda axes: _draw_per_token(axes, runs, limits),
        lambda axes: _draw_latencies(axes, runs, "e2e", "Time to the end", limits.max_e2e_ms),
        lambda axes: _draw_rate(axes, runs),
        lambda axes: _draw_open(axes, runs),
        lambda axes: _draw_requests(axes, runs),
    ]
    save_panels(path, title, note, panels, columns=3)


def _coloured(runs: Runs) -> Iterator[tuple[str, str, Sequence[LoadRun]]]:
    for colour, (name, repeats) in zip(COLOURS, runs.items(), strict=False):
        yield colour, name, repeats


# ---- latencies ---------------------------------------------------------------------------------------------------


def _draw_latencies(axes: Any, runs: Runs, latency: str, title: str, limit: float | None) -> None:
    for colour, name, repeats in _coloured(runs):
        _draw_shares(axes, _latencies(repeats, latency), color=colour, label=name)
    _dress_shares(axes, title, limit)


def _draw_per_token(axes: Any, runs: Runs, limits: LatencyLimits) -> None:
    for colour, name, repeats in _coloured(runs):
        gaps = token_gaps([record for run in repeats for record in answered(run)])
        _draw_shares(axes, gaps, color=colour, label=f"{name}: ITL", linestyle=":")
        _draw_shares(axes, _latencies(repeats, "tpot"), color=colour, label=f"{name}: TPOT")
    _dress_shares(axes, "Time per token (TPOT) and between pieces (ITL)", limits.max_tpot_ms)


def _latencies(runs: Sequence[LoadRun], latency: str) -> list[float]:
    """One latency of all answers that have it."""
    seconds = (getattr(Latency.of(record), latency) for run in runs for record in answered(run))
    return [value for value in seconds if value is not None]


def _draw_shares(axes: Any, seconds: Sequence[float], **style: Any) -> None:
    """For each time on the x axis, the share of `seconds` that are not above it."""
    if not seconds:
        return
    milliseconds = sorted(value * 1e3 for value in seconds)
    shares = [(index + 1) / len(milliseconds) for index in range(len(milliseconds))]
    axes.step([milliseconds[0], *milliseconds], [0.0, *shares], where="post", linewidth=1.8, **style)


def _dress_shares(axes: Any, title: str, limit: float | None) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis.set_minor_formatter(LogFormatter())  # shows labels only where major ticks are few
    axes.set_ylim(0, 1.02)
    if limit is not None:
        axes.axvline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"limit {limit:g} ms")
    _label(axes, title, "ms", "share that took no longer")


# ---- over time ---------------------------------------------------------------------------------------------------


def _draw_rate(axes: Any, runs: Runs) -> None:
    for colour, name, (run, *_) in _coloured(runs):
        axes.plot(_middles(run), tokens_over_time(run, _width(run)), color=colour, linewidth=1.8, label=name)
    _dress_time(axes, "Output tokens per second", "tokens/s")


def _draw_open(axes: Any, runs: Runs) -> None:
    for colour, name, (run, *_) in _coloured(runs):
        middles, width = _middles(run), _width(run)
        waiting = [_until_first(record) for record in run.records]
        axes.plot(middles, open_over_time(run.records, width), color=colour, linewidth=1.8, label=f"{name}: open")
        label = f"{name}: without a token yet"
        axes.fill_between(middles, open_over_time(waiting, width), color=colour, alpha=0.3, linewidth=0, label=label)
    _dress_time(axes, "Requests in flight", "requests")


def _draw_requests(axes: Any, runs: Runs) -> None:
    for colour, name, (run, *_) in _coloured(runs):
        good, failed = answered(run), [record for record in run.records if record.error is not None]
        ttft = [Latency.of(record).ttft * 1e3 for record in good]
        axes.scatter([record.sent for record in good], ttft, s=14, alpha=0.7, color=colour, label=name, linewidths=0)
        if failed:
            lengths = [(record.end - record.sent) * 1e3 for record in failed]
            sent, label = [record.sent for record in failed], f"{name}: failed, until then"
            axes.scatter(sent, lengths, s=28, marker="x", color=RED, label=label)
    _dress_time(axes, "Time to first token of each request, by when it was sent", "ms")


def _width(run: LoadRun) -> float:
    return max(run.seconds, 1e-9) / SLICES


def _middles(run: LoadRun) -> list[float]:
    return [(index + 0.5) * _width(run) for index in range(SLICES)]


def tokens_over_time(run: LoadRun, width: float) -> list[float]:
    """Output tokens per second in each slice of `width` seconds. A piece stands for as many as its answer's mean."""
    rates = [0.0] * SLICES
    for record in answered(run):
        for moment in record.times:
            rates[min(int(moment / width), SLICES - 1)] += record.output_tokens / len(record.times) / width
    return rates


def open_over_time(records: Sequence[LoadRecord], width: float) -> list[float]:
    """How many requests were open in each slice of `width` seconds, on average."""
    counts = [0.0] * SLICES
    for record in records:
        first, last = (min(int(moment / width), SLICES - 1) for moment in (record.sent, record.end))
        for index in range(first, last + 1):
            begin, end = max(record.sent, index * width), min(record.end, (index + 1) * width)
            counts[index] += max(0.0, end - begin) / width
    return counts


def _until_first(record: LoadRecord) -> LoadRecord:
    return LoadRecord(record.due, record.sent, end=record.times[0] if record.times else record.end)


def _dress_time(axes: Any, title: str, y_label: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _label(axes, title, "seconds since the start", y_label)


def _label(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=8)

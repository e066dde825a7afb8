"""Figures of a load from the records of its requests, their tables and plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from chairlift.options import above
from chairlift.terminal.tables import Column, show_table
from chairlift_lab.common.engines import percentile
from chairlift_lab.load.client import LoadRecord, LoadRun
from chairlift_lab.report.options import PlotPanel, Settings, save_panels


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


def answered(runs: Sequence[LoadRun]) -> list[LoadRecord]:
    return [record for run in runs for record in run.records if record.error is None]


def latencies(records: Sequence[LoadRecord]) -> dict[str, list[float]]:
    """The seconds of each kind of latency; ITL are those between consecutive pieces of the same answer."""
    each = [Latency.of(record) for record in records]
    return {
        "ttft": [latency.ttft for latency in each],
        "tpot": [latency.tpot for latency in each if latency.tpot is not None],
        "itl": [later - earlier for record in records for earlier, later in pairwise(record.times)],
        "e2e": [latency.e2e for latency in each],
    }


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
    records, completed = [record for run in runs for record in run.records], answered(runs)
    seconds = max(sum(run.seconds for run in runs), 1e-9)
    good = sum(limits.met_by(Latency.of(record)) for record in completed)
    names = ("input_tokens", "cached_tokens", "output_tokens")
    tokens = {name: sum(getattr(record, name) for record in completed) for name in names}
    row = {
        "name": name,
        "runs": len(runs),
        "requests": len(records),
        "completed": len(completed),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "seconds": seconds,
        "requests_per_s": len(completed) / seconds,
        "output_tokens_per_s": tokens["output_tokens"] / seconds,
        "total_tokens_per_s": (tokens["input_tokens"] + tokens["output_tokens"]) / seconds,
        **tokens,
        "goodput_per_s": good / seconds,
        "goodput_share": good / len(records) if records else None,
        "peak_concurrency": max((count for run in runs for _, count in in_flight(run.records)), default=0),
        "send_lag_p99_ms": _percentile_ms([record.sent - record.due for record in records], 99),
    }
    for latency, values in latencies(completed).items():
        row[f"{latency}_mean_ms"] = sum(values) / len(values) * 1e3 if values else None
        row |= {f"{latency}_p{percent}_ms": _percentile_ms(values, percent) for percent in (50, 95, 99)}
    roles = dict.fromkeys(role for run in runs for role in run.cpu_seconds)
    return row | {"cpu_seconds": {role: sum(run.cpu_seconds.get(role, 0.0) for run in runs) for role in roles}}


def _percentile_ms(seconds: list[float], percent: float) -> float | None:
    return percentile(seconds, percent) * 1e3 if seconds else None


def _cpu_column(role: str) -> Column:
    return Column(f"CPU s, {role.replace('_', ' ')}", lambda row: row["cpu_seconds"].get(role), ",.2f")


# The lines of the first table, which has a column for each run.
THROUGHPUT = (
    Column("requests", lambda row: f"{row['completed']:,} of {row['requests']:,}"),
    Column("seconds", "seconds", ",.1f"),
    Column("requests/s", "requests_per_s", ",.2f"),
    Column("output tokens/s", "output_tokens_per_s", ",.1f"),
    Column("all tokens/s", "total_tokens_per_s", ",.1f"),
    Column("prompt tokens", "input_tokens", ",d"),
    Column("of them cached", "cached_tokens", ",d"),
    Column("output tokens", "output_tokens", ",d"),
    Column("good requests/s", "goodput_per_s", ",.2f"),
    Column("good share", "goodput_share", ".1%"),
    Column("most at a time", "peak_concurrency", ",d"),
    Column("sent late, p99 ms", "send_lag_p99_ms", ",.1f"),
)
CPU_SECONDS = {role: _cpu_column(role) for role in ("client", "front_end", "engine")}
SPREAD = ("mean", "p50", "p95", "p99")
LATENCY_CAPTION = (
    "TTFT: to the first token · TPOT: per token after it, one figure per request\n"
    "ITL: between two pieces of an answer · E2E: to its end"
)


@dataclass(frozen=True, slots=True)
class LoadTables:
    """Throughput and latencies of each run, with a column for each."""

    rows: Sequence[Mapping[str, Any]]
    title: str
    limits: LatencyLimits

    def show(self) -> None:
        console, rows = Console(), self.rows
        console.print(f"\n[bold]{self.title}[/bold]", highlight=False)
        lines = [line for line in THROUGHPUT if self.limits.given or not line.heading.startswith("good ")]
        lines += [line for role, line in CPU_SECONDS.items() if any(role in row["cpu_seconds"] for row in rows)]
        cells = ([line.heading, *(line.cell(row) for row in rows)] for line in lines)
        show_table("", ["", *(str(row["name"]) for row in rows)], cells)
        spread = [
            [
                f"{name.upper()} {row['name']}" if len(rows) > 1 else name.upper(),
                *(Column("", f"{name}_{figure}_ms", ",.1f").cell(row) for figure in SPREAD),
            ]
            for name in ("ttft", "tpot", "itl", "e2e")
            for row in rows
        ]
        show_table("", ["Latency, ms", *SPREAD], spread, LATENCY_CAPTION)
        for row in rows:
            for error, count in sorted(row["errors"].items(), key=lambda item: -item[1]):
                console.print(f"{row['name']}: {count:,} failed: {error}", style="red", highlight=False, markup=False)
        if len(rows) == 2:
            ratio = rows[0]["speedup_vs"][rows[1]["name"]]
            console.print(f"{rows[0]['name']} / {rows[1]['name']}: [bold]{ratio:.1%}[/bold] of the output tokens/s")


COLOURS = ("#0b6e99", "#d9730d")  # blue and orange: safe for most kinds of colour blindness
RED = "#c4314b"
SLICES = 80  # parts into which the time of a run is divided


Runs = Mapping[str, Sequence[LoadRun]]


def plot_load(path: Path, title: str, note: str, runs: Runs, limits: LatencyLimits) -> None:
    """Six panels, with a colour for each name in `runs`; the panels over time show the first run of each."""
    panels: list[PlotPanel] = [
        _shares(runs, "Time to first token", limits.max_ttft_ms, ttft="-"),
        _shares(runs, "Time per token (TPOT) and between pieces (ITL)", limits.max_tpot_ms, itl=":", tpot="-"),
        _shares(runs, "Time to the end", limits.max_e2e_ms, e2e="-"),
        _over_time(runs, "Output tokens per second", "tokens/s", _draw_rate),
        _over_time(runs, "Requests in flight", "requests", _draw_open),
        _over_time(runs, "Time to first token of each request, by when it was sent", "ms", _draw_requests),
    ]
    save_panels(path, title, note, panels, columns=3)


def _shares(runs: Runs, title: str, limit: float | None, **styles: str) -> PlotPanel:
    """For each time on the x axis, the share of the answers that took no longer; `styles` are those of latencies."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogFormatter

        for colour, (name, repeats) in zip(COLOURS, runs.items(), strict=False):
            seconds = latencies(answered(repeats))
            for latency, style in styles.items():
                times = sorted(value * 1e3 for value in seconds[latency])
                shares = [(index + 1) / len(times) for index in range(len(times))]
                label = name if len(styles) == 1 else f"{name}: {latency.upper()}"
                line = {"color": colour, "linestyle": style, "label": label, "linewidth": 1.8}
                if times:
                    axes.step([times[0], *times], [0.0, *shares], where="post", **line)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.xaxis.set_minor_formatter(LogFormatter())  # shows labels only where major ticks are few
        axes.set_ylim(0, 1.02)
        if limit is not None:
            axes.axvline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"limit {limit:g} ms")
        _label(axes, title, "ms", "share that took no longer")

    return draw


def _over_time(runs: Runs, title: str, y_label: str, draw_run: Callable[[Any, str, str, LoadRun], None]) -> PlotPanel:
    def draw(axes: Any) -> None:
        for colour, (name, (run, *_)) in zip(COLOURS, runs.items(), strict=False):
            draw_run(axes, colour, name, run)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        _label(axes, title, "seconds since the start", y_label)

    return draw


def _draw_rate(axes: Any, colour: str, name: str, run: LoadRun) -> None:
    middles, width = _slices(run)
    axes.plot(middles, tokens_over_time(run, width), color=colour, linewidth=1.8, label=name)


def _draw_open(axes: Any, colour: str, name: str, run: LoadRun) -> None:
    middles, width = _slices(run)
    waiting = [replace(record, end=record.times[0] if record.times else record.end) for record in run.records]
    axes.plot(middles, open_over_time(run.records, width), color=colour, linewidth=1.8, label=f"{name}: open")
    label = f"{name}: without a token yet"
    axes.fill_between(middles, open_over_time(waiting, width), color=colour, alpha=0.3, linewidth=0, label=label)


def _draw_requests(axes: Any, colour: str, name: str, run: LoadRun) -> None:
    good, failed = answered([run]), [record for record in run.records if record.error is not None]
    ttft = [Latency.of(record).ttft * 1e3 for record in good]
    axes.scatter([record.sent for record in good], ttft, s=14, alpha=0.7, color=colour, label=name, linewidths=0)
    if failed:
        lengths = [(record.end - record.sent) * 1e3 for record in failed]
        sent, label = [record.sent for record in failed], f"{name}: failed, until then"
        axes.scatter(sent, lengths, s=28, marker="x", color=RED, label=label)


def _slices(run: LoadRun) -> tuple[list[float], float]:
    """The middles of the slices of a run, and their width in seconds."""
    width = max(run.seconds, 1e-9) / SLICES
    return [(index + 0.5) * width for index in range(SLICES)], width


def tokens_over_time(run: LoadRun, width: float) -> list[float]:
    """Output tokens per second in each slice of `width` seconds. A piece stands for as many as its answer's mean."""
    rates = [0.0] * SLICES
    for record in answered([run]):
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


def _label(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=8)

"""The plot of `chairlift bench serve`: latencies, and the server's work over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift_lab.load.client import LoadRecord, LoadRun
from chairlift_lab.load.figures import Latency, LatencyLimits, answered, token_gaps
from chairlift_lab.report.plots import PlotPanel, save_panels

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

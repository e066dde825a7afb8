"""`chairlift bench throughput`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.errors import InvalidParameter
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.throughput.options import PeerOptions, ThroughputWorkload
from chairlift_lab.bench.throughput.rounds import ConcurrencyResult, Rounds
from chairlift_lab.bench.throughput.run import ALL_ENGINES, ENGINES, OWN_ENGINES, ThroughputComparison
from chairlift_lab.common.measure import TokenProgress
from chairlift_lab.common.workload import Workload
from chairlift_lab.report.lists import parse_names

NAME = Column("\nEngine", "name")
TOKENS = Column("Output\ntokens/s", "output_tokens_per_s", ",.1f")
ENGINE_COLUMNS = (
    *(NAME, TOKENS),
    Column("TTFT\np50 s", "ttft_p50_ms", ".2f", factor=1e-3),
    Column("ITL\nmean ms", "itl_mean_ms", ".1f"),
    Column("Mean\nbatch", "mean_batch_requests", ".1f"),
    Column("Over-\nhead", "scheduler_share", ".1%"),
)
PEER_COLUMNS = (
    *(NAME, TOKENS),
    Column("TTFT\np50 ms", "ttft_p50_ms", ",.0f"),
    Column("TTFT\np95 ms", "ttft_p95_ms", ",.0f"),
    Column("ITL\nmean ms", "itl_mean_ms", ",.1f"),
    Column("ITL\np99 ms", "itl_p99_ms", ",.1f"),
    Column("Of the\nbest peer", "vs_best_peer", ".2f", unit="x"),
)


@bench(
    "throughput",
    "chairlift bench throughput",
    "chairlift bench throughput --requests 16 --prompt-len 128 --output-len 32:64 --engines chairlift",
    "chairlift bench throughput --workload workload.json --concurrency 32 --json result.json",
    "chairlift bench throughput --peers llama.cpp,openvino --concurrency 1,8,32 --repeat 3 "
    "--peer-python llama.cpp=llama/bin/python --peer-python openvino=ov/bin/python --peer-model openvino=OV_FOLDER",
)
def bench_throughput(
    context: typer.Context,
    engine: EngineOptions,
    work_options: ThroughputWorkload,
    peer_options: PeerOptions,
    engines: Annotated[
        str,
        typer.Option(
            help="Engines to compare, in this order; also chairlift-fp32.", show_default="with --peers, chairlift"
        ),
    ] = ",".join(ENGINES),
    repeat: Annotated[int, typer.Option(help="Repetitions; the figures are medians.")] = 1,
) -> BenchResult:
    """Output tokens per second of this engine, of itself one request at a time, and of other engines.

    All requests are submitted at once and generate greedily to their full length.
    The engines run one after the other in this process, with the same number of
    threads.

    With --peers, each peer runs in a process and a Python of its own. All engines
    then keep --concurrency requests in flight: the next is sent when one has
    finished. Prefixes are not cached.
    """
    if repeat < 1:
        raise InvalidParameter("repeat", f"must be at least 1, got {repeat}")
    concurrencies = work_options.concurrencies(engine)
    comparison = _comparison(context, engine, engines, against_peers=peer_options.peers is not None)
    show_log(quiet=engine.quiet)
    work, source = work_options.make(context, comparison)
    rounds = Rounds(comparison, peer_options.make(context, comparison), concurrencies, repeat)
    results: list[ConcurrencyResult] = []
    for result in rounds.run(work, lambda name: _watch(name, work, enabled=not engine.quiet)):
        _table(rounds, result).show()  # now: the next concurrency takes minutes
        known = {reason for before in results for reason in before.skipped.items()}
        for name, reason in result.skipped.items():
            if (name, reason) not in known:
                Line(f"No row for {name}: {reason}\n").show()
        results.append(result)
    return BenchResult(
        _settings(rounds, results) | {"requests": len(work.requests)} | source,
        [row for result in results for row in result.rows],
    )


def _comparison(
    context: typer.Context, engine: EngineOptions, engines: str, *, against_peers: bool
) -> ThroughputComparison:
    options, progress = engine.config(), not engine.quiet
    if not against_peers:
        return ThroughputComparison(
            engine.model, parse_names("engines", engines, ALL_ENGINES), options, progress=progress
        )
    if engine.prefix_caching and given(context, "prefix_caching"):
        raise InvalidParameter("prefix_caching", "is off in a comparison with --peers, for all engines")
    own = parse_names("engines", engines, OWN_ENGINES) if given(context, "engines") else ["chairlift"]
    options["prefix_caching"] = False
    return ThroughputComparison(engine.model, own, options, progress=progress, closed_loop=True)


def _settings(rounds: Rounds, results: Sequence[ConcurrencyResult]) -> dict[str, Any]:
    concurrencies = [result.concurrency for result in results]
    versions = {name: version for name, version in rounds.versions.items() if isinstance(version, str)}
    skipped = [
        {"name": name, "concurrency": result.concurrency, "reason": reason}
        for result in results
        for name, reason in result.skipped.items()
    ]
    return rounds.own.settings() | {
        "concurrency": concurrencies[0] if len(concurrencies) == 1 else concurrencies,
        "repeat": rounds.repeat,
        "closed_loop": rounds.own.closed_loop,
        "peers": {peer.name: {"version": versions.get(peer.name), "model": peer.model.name} for peer in rounds.peers},
        "skipped": skipped,
    }


@contextmanager
def _watch(name: str, work: Workload, *, enabled: bool) -> Iterator[TokenProgress]:
    """A progress bar for the tokens of one engine."""
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    shown = enabled and sys.stderr.isatty()
    console = Console(file=sys.stderr)  # bound now, because loading transformers replaces sys.stderr for a while
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(name, total=work.output_tokens, speed="loading")
        begun = 0.0

        def advance(tokens: int) -> None:
            nonlocal begun
            begun = begun if tokens else time.perf_counter()
            speed = tokens / max(time.perf_counter() - begun, 1e-9)
            progress.update(task, completed=tokens, speed=f"{speed:,.0f} tokens/s")

        yield advance


def _table(rounds: Rounds, result: ConcurrencyResult) -> Table:
    title = f"Throughput at concurrency {result.concurrency}"
    if rounds.peers:
        return Table(title, PEER_COLUMNS, result.rows)
    first = result.rows[0]
    ratio = Column(
        f"{first['name']}\nis", lambda row: first["speedup_vs"].get(row["name"]), ".2f", unit="x", missing=""
    )
    caption = "Overhead: scheduling and building batches, as a share of the steps"
    return Table(title, [*ENGINE_COLUMNS, ratio], result.rows, caption)

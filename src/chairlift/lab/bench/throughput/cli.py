"""`chairlift bench throughput`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.base import bench
from chairlift.lab.bench.throughput.options import PeerOptions, WorkloadOptions
from chairlift.lab.bench.throughput.rounds import Rounds, Table
from chairlift.lab.bench.throughput.run import ENGINES, OWN_ENGINES, Comparison, parse_engines
from chairlift.lab.common.measure import Advance
from chairlift.lab.common.output import show_table
from chairlift.lab.common.report import check_writable, machine, machine_line, write_report
from chairlift.lab.common.workload import Workload
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, given


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
    work_options: WorkloadOptions,
    peer_options: PeerOptions,
    engines: Annotated[
        str,
        typer.Option(
            help="What to compare, in this order; also chairlift-fp32.", show_default="with --peers, chairlift"
        ),
    ] = ",".join(ENGINES),
    repeat: Annotated[int, typer.Option(help="Rounds; the figures are medians over them.")] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report there (keys: docs/bench-json.md)."),
    ] = None,
) -> None:
    """Output tokens per second of this engine, of itself one request at a time, and of others.

    All requests are submitted at once and generate greedily until their
    length is reached. The engines run one after the other in this process,
    with as many threads each.

    With --peers each of those runs in a process and a Python of its own. All
    engines then keep as many requests under way as --concurrency says: the
    next is sent when one has ended. Prefixes are not cached.
    """
    if repeat < 1:
        raise InvalidParameter("repeat", f"must be at least 1, got {repeat}")
    concurrencies = work_options.concurrencies(engine)
    comparison = _comparison(context, engine, engines, against_peers=peer_options.peers is not None)
    if json_file is not None:
        check_writable(json_file)
    show_log(quiet=engine.quiet)
    work, source = work_options.make(context, comparison)
    rounds = Rounds(comparison, peer_options.make(context, comparison), concurrencies, repeat)
    tables: list[Table] = []
    for table in rounds.run(work, lambda name: _watch(name, work, enabled=not engine.quiet)):
        _show(rounds, table, tables)
        tables.append(table)
    Console().print(machine_line(machine()), style="dim", highlight=False)
    if json_file is not None:
        settings = _settings(rounds, tables) | {"requests": len(work.requests)} | source
        write_report(json_file, "throughput", settings, [row for table in tables for row in table.rows])


def _comparison(context: typer.Context, engine: EngineOptions, engines: str, *, against_peers: bool) -> Comparison:
    options = engine.config()
    if not against_peers:
        return Comparison(engine.model, parse_engines(engines), options, progress=not engine.quiet)
    if engine.prefix_caching and given(context, "prefix_caching"):
        raise InvalidParameter("prefix_caching", "is off in the comparison with --peers, here and there")
    own = parse_engines(engines, OWN_ENGINES) if given(context, "engines") else ["chairlift"]
    options["prefix_caching"] = False
    return Comparison(engine.model, own, options, progress=not engine.quiet, closed_loop=True)


def _settings(rounds: Rounds, tables: Sequence[Table]) -> dict[str, Any]:
    seats = [table.concurrency for table in tables]
    versions = {name: version for name, version in rounds.versions.items() if isinstance(version, str)}
    skipped = [
        {"name": name, "concurrency": table.concurrency, "reason": reason}
        for table in tables
        for name, reason in table.skipped.items()
    ]
    return rounds.own.settings() | {
        "concurrency": seats[0] if len(seats) == 1 else seats,
        "repeat": rounds.repeat,
        "closed_loop": rounds.own.closed_loop,
        "peers": {peer.name: {"version": versions.get(peer.name), "model": peer.model.name} for peer in rounds.peers},
        "skipped": skipped,
    }


@contextmanager
def _watch(name: str, work: Workload, *, enabled: bool) -> Iterator[Advance]:
    """A bar that fills with the tokens of one engine."""
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    shown = enabled and sys.stderr.isatty()
    console = Console(file=sys.stderr)  # this very stream: loading transformers exchanges sys.stderr for a while
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(name, total=work.output_tokens, speed="loading")
        begun = 0.0

        def advance(tokens: int) -> None:
            nonlocal begun
            begun = begun if tokens else time.perf_counter()
            speed = tokens / max(time.perf_counter() - begun, 1e-9)
            progress.update(task, completed=tokens, speed=f"{speed:,.0f} tokens/s")

        yield advance


def _show(rounds: Rounds, table: Table, earlier: Sequence[Table]) -> None:
    if rounds.peers:
        _show_against_peers(table)
    else:
        _show_engines(table)
    known = {reason for before in earlier for reason in before.skipped.items()}
    for name, reason in table.skipped.items():
        if (name, reason) not in known:
            Console().print(f"No row for {name}: {reason}\n", highlight=False, markup=False, soft_wrap=True)


def _show_engines(table: Table) -> None:
    first = table.rows[0]
    figures = ("Output\ntokens/s", "TTFT\np50 s", "ITL\nmean ms", "Mean\nbatch", "Over-\nhead")

    def cells(row: Mapping[str, Any]) -> list[str]:
        ratio = first["speedup_vs"].get(row["name"])
        return [
            row["name"],
            f"{row['output_tokens_per_s']:,.1f}",
            f"{row['ttft_p50_ms'] / 1e3:.2f}",
            _or_dash(row["itl_mean_ms"], ".1f"),
            _or_dash(row["mean_batch_requests"], ".1f"),
            _or_dash(row["scheduler_share"], ".1%"),
            "" if ratio is None else f"{ratio:.2f}x",
        ]

    show_table(
        f"Throughput at concurrency {table.concurrency}",
        ["\nEngine", *figures, f"{first['name']}\nis"],
        map(cells, table.rows),
        "Overhead: scheduling and building batches, as a share of the steps",
    )


def _show_against_peers(table: Table) -> None:
    figures = ("Output\ntokens/s", "TTFT\np50 ms", "TTFT\np95 ms", "ITL\nmean ms", "ITL\np99 ms", "Of the\nbest peer")

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [
            row["name"],
            f"{row['output_tokens_per_s']:,.1f}",
            f"{row['ttft_p50_ms']:,.0f}",
            f"{row['ttft_p95_ms']:,.0f}",
            _or_dash(row["itl_mean_ms"], ",.1f"),
            _or_dash(row["itl_p99_ms"], ",.1f"),
            "-" if row["vs_best_peer"] is None else f"{row['vs_best_peer']:.2f}x",
        ]

    title = f"Throughput at concurrency {table.concurrency}"
    show_table(title, ["\nEngine", *figures], map(cells, table.rows))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

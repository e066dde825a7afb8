"""Output tokens per second: this engine, itself without batching, transformers, and peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, given, refuse_given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench, progress_bar
from chairlift_lab.common.engines import TokenProgress
from chairlift_lab.common.workload import LengthRange, Workload, load_workload, make_workload
from chairlift_lab.peers.comparison import (
    ALL_ENGINES,
    ENGINES,
    OWN_ENGINES,
    ConcurrencyResult,
    Rounds,
    ThroughputComparison,
)
from chairlift_lab.peers.peers import PEERS, Peer, parse_peer_paths
from chairlift_lab.report.options import parse_names, parse_numbers

_workload, _peers = (partial(typer.Option, rich_help_panel=panel) for panel in ("Workload", "Peers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWorkload:
    """Random requests, or those of a file."""

    requests: Annotated[int, _workload(help="Number of requests; with --workload, the first of the file.")] = 64
    prompt_len: Annotated[str, _workload(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.")] = "16:512"
    output_len: Annotated[str, _workload(metavar="LOW:HIGH", help="Output tokens, log-uniform.")] = "16:256"
    seed: Annotated[int, _workload(help="The same seed gives the same requests.")] = 0
    workload: Annotated[
        Path | None,
        _workload(help='Read the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.'),
    ] = None
    concurrency: Annotated[
        str | None,
        _workload(
            metavar="N[,N…]",
            help="Requests per step of every engine that batches; a table for each N.",
            show_default="from the machine",
        ),
    ] = None

    def concurrencies(self, engine: EngineOptions) -> list[int | None]:
        if self.concurrency is None:
            return [None]
        if engine.max_batch_requests is not None:
            raise InvalidParameter("concurrency", "means max_batch_requests for all engines; give only one of them")
        numbers = parse_numbers("concurrency", self.concurrency)
        if min(numbers) < 1:
            raise InvalidParameter("concurrency", f"must be at least 1, got {min(numbers)}")
        if len(set(numbers)) < len(numbers):
            raise InvalidParameter("concurrency", f"{self.concurrency!r} repeats a number")
        return numbers

    def make(self, context: typer.Context, comparison: ThroughputComparison) -> tuple[Workload, dict[str, Any]]:
        """The requests, and their source for the report."""
        lengths = {name: LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len")}
        if self.workload is None:
            work = make_workload(comparison.vocabulary(), requests=self.requests, seed=self.seed, **lengths)
            drawn = {name: str(length) for name, length in lengths.items()}
            return work, {"workload": None, "seed": self.seed} | drawn
        problem = "the requests come from the workload file; give only one of them"
        refuse_given(context, ("prompt_len", "output_len", "seed"), problem)
        work = load_workload(self.workload)
        if given(context, "requests"):
            if not 1 <= self.requests <= len(work.requests):
                raise InvalidParameter("requests", f"must be 1 to {len(work.requests)}, as many as {self.workload} has")
            work = Workload(work.requests[: self.requests])
        return work, {"workload": self.workload.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The peers to run, and what they need."""

    peers: Annotated[
        str | None,
        _peers(
            help=f"Other engines to compare with: {', '.join(PEERS)}. One that cannot run here is left out, with the "
            "reason.",
            show_default="none",
        ),
    ] = None
    peer_python: Annotated[
        list[str] | None,
        _peers(
            metavar="NAME=PYTHON",
            help="The Python that has the peer's package; repeatable.",
            show_default="this one",
        ),
    ] = None
    peer_model: Annotated[
        list[str] | None,
        _peers(
            metavar="NAME=PATH",
            help="The model that a peer loads instead of --model; repeatable.",
            show_default="--model",
        ),
    ] = None
    peer_timeout: Annotated[float, _peers(help="Seconds for one run of a peer, loading included.")] = 900.0

    def make(self, context: typer.Context, comparison: ThroughputComparison) -> list[Peer]:
        from chairlift.loading.resolve import resolve_model

        if self.peers is None:
            refuse_given(context, ("peer_python", "peer_model", "peer_timeout"), "has no effect without --peers")
            return []
        if self.peer_timeout <= 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.peer_timeout:g}")
        names = parse_names("peers", self.peers, PEERS)
        pythons = parse_peer_paths("peer_python", self.peer_python or [], names)
        models = parse_peer_paths("peer_model", self.peer_model or [], names)
        settings = comparison.settings()
        if settings["device"] != "cpu":
            raise InvalidParameter("peers", "run on the CPU; add --device cpu")
        default = resolve_model(comparison.model, progress=comparison.progress)
        return [
            Peer(
                name,
                models.get(name, default),
                pythons.get(name, Path(sys.executable)),
                threads=settings["threads"],
                dtype=settings["dtype"],
                timeout=self.peer_timeout,
            )
            for name in names
        ]


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
    The engines run one after the other with the same number of threads,
    transformers in a process of its own.

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
    with progress_bar(name, work.output_tokens, f"of {work.output_tokens:,} tokens", enabled=enabled) as advance:
        yield lambda tokens: advance(tokens, tokens)


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

"""Output tokens per second: this engine, itself without batching, transformers, and peers."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from chairlift.config import EngineConfig
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, given, refuse_given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, WorkloadOptions, bench, progress_bar
from chairlift_lab.common.engines import Measurement, TokenProgress, add_speedups, measure_engine
from chairlift_lab.common.workload import Workload, load_workload, make_workload
from chairlift_lab.load.local_server import local_model_facts
from chairlift_lab.peers.peers import MAX_BATCH_TOKENS, PEERS, Peer, PeerFailed, parse_peer_paths
from chairlift_lab.report.options import parse_names, parse_numbers

if TYPE_CHECKING:
    from chairlift.engine.settings import MachineSettings

ENGINES = ("chairlift", "one-at-a-time", "transformers")
OWN_ENGINES = ("chairlift", "chairlift-fp32")
ALL_ENGINES = tuple(dict.fromkeys(ENGINES + OWN_ENGINES))
# The fields of `EngineConfig` in which engines of ours differ from the options.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "chairlift": {},
    "chairlift-fp32": {"quantization": "none", "dtype": "float32"},
    "one-at-a-time": {"max_batch_requests": 1, "prefix_caching": False},
}

Row = dict[str, Any]
Watch = Callable[[str], AbstractContextManager[TokenProgress]]
"""Shows the progress of the engine of that name."""


@dataclass(frozen=True)
class ThroughputComparison:
    """Engines to run on one model; `options` are fields of `EngineConfig`.

    All requests are submitted at once. With `closed_loop`, our own engines get at most as many as they have slots, and
    the next when one has finished.
    """

    model: str
    engines: Sequence[str] = ENGINES
    options: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = True  # Whether downloading the model shows progress.
    closed_loop: bool = False

    @cached_property
    def machine(self) -> MachineSettings:
        from chairlift.engine.settings import resolve_machine

        return resolve_machine(EngineConfig(**self.options))

    @cached_property
    def path(self) -> Path:
        from chairlift.loading.resolve import resolve_model

        return resolve_model(self.model, progress=self.progress)

    @property
    def transformers_batch_tokens(self) -> int:
        return self.options.get("max_batch_tokens") or MAX_BATCH_TOKENS

    def settings(self) -> dict[str, Any]:
        """The settings with all defaults resolved."""
        config, machine = EngineConfig(**self.options), self.machine
        names = ("quantization", "max_model_len", "block_size", "kv_memory", "prefix_caching", "attention")
        return {
            "model": self.model,
            "engines": list(self.engines),
            "threads": machine.threads,
            "device": str(machine.device),
            "dtype": str(machine.dtype).removeprefix("torch."),
            "concurrency": machine.max_batch_requests,
            "max_batch_tokens": machine.max_batch_tokens,
            "max_prefill_tokens": config.max_prefill_tokens or machine.max_batch_tokens,
            **{name: getattr(config, name) for name in names},
            "transformers_max_batch_tokens": self.transformers_batch_tokens,
        }

    def vocabulary(self) -> list[int]:
        """The token ids that prompts can be made of."""
        return local_model_facts(self.model, self.options, progress=self.progress)[0]

    def peer(self, name: str, **given: Any) -> Peer:
        """An engine that runs on the same model and machine, unless it is given another model."""
        dtype = str(self.machine.dtype).removeprefix("torch.")
        shared: dict[str, Any] = {"model": self.path, "threads": self.machine.threads, "dtype": dtype}
        return Peer(name, **shared | given)

    def run(self, workload: Workload, watch: Watch) -> list[Row]:
        """Load, warm up and measure one engine after the other; return a row for each."""
        import torch

        if "transformers" in self.engines and find_spec("accelerate") is None and self.path.suffix == ".gguf":
            problem = "transformers needs the package accelerate to read GGUF files"
            raise InvalidParameter("engines", f"{problem}; install it or leave transformers out")
        threads = torch.get_num_threads()
        rows = []
        for name in self.engines:
            torch.set_num_threads(threads)  # the engine before may have changed it
            measure = self._measure_transformers if name == "transformers" else partial(self._measure_own, name)
            with watch(name) as advance:
                rows.append(measure(workload, advance).row(name))
            gc.collect()
            if torch.cuda.is_initialized():  # the next engine may be in another process
                torch.cuda.empty_cache()
        add_speedups(rows)
        return rows

    def _measure_own(self, name: str, workload: Workload, advance: TokenProgress) -> Measurement:
        from chairlift.engine.startup import load_engine

        loaded = load_engine(self.model, EngineConfig(**{**self.options, **CHANGES[name]}), progress=self.progress)
        in_flight = loaded.engine.scheduler.max_batch_requests if self.closed_loop else None
        return measure_engine(loaded.engine, workload, advance, in_flight=in_flight)

    def _measure_transformers(self, workload: Workload, advance: TokenProgress) -> Measurement:
        """All requests at once, as for our own engines; transformers puts as many as fit into a step."""
        how = {"device": str(self.machine.device), "max_batch_tokens": self.transformers_batch_tokens}
        peer, everything = self.peer("transformers", timeout=threading.TIMEOUT_MAX, **how), len(workload.requests)
        slots = min(self.machine.max_batch_requests, everything)
        try:
            return peer.measure(workload, slots, advance, in_flight=everything)
        except PeerFailed as failure:
            raise EngineDead(f"transformers {failure}; run with --engines without it") from None


class ConcurrencyResult(NamedTuple):
    """The rows of one concurrency, and why peers have none."""

    concurrency: int
    rows: list[Row]
    skipped: dict[str, str]  # The reason for each peer, by name.


@dataclass(frozen=True)
class Rounds:
    """Every round runs each engine once, so that a slow phase of the machine affects all of them."""

    own: ThroughputComparison
    peers: Sequence[Peer] = ()
    concurrencies: Sequence[int | None] = (None,)  # None: the engine's default
    repeat: int = 1

    @cached_property
    def versions(self) -> dict[str, str | PeerFailed]:
        """The version of each peer, or why it cannot run."""

        def version(peer: Peer) -> str | PeerFailed:
            try:
                return peer.version()
            except PeerFailed as failure:
                return failure

        return {peer.name: version(peer) for peer in self.peers}

    def run(self, workload: Workload, watch: Watch) -> Iterator[ConcurrencyResult]:
        for concurrency in self.concurrencies:
            changes = {} if concurrency is None else {"max_batch_requests": concurrency}
            yield self._run_one(replace(self.own, options={**self.own.options, **changes}), workload, watch)

    def _run_one(self, own: ThroughputComparison, workload: Workload, watch: Watch) -> ConcurrencyResult:
        slots = own.machine.max_batch_requests
        runs: dict[str, list[Row]] = {}
        skipped = {name: str(version) for name, version in self.versions.items() if isinstance(version, PeerFailed)}
        for _ in range(self.repeat):
            for row in own.run(workload, watch):
                runs.setdefault(row["name"], []).append(row)
            for peer in self.peers:
                if peer.name in skipped:
                    continue
                try:
                    with watch(peer.name) as advance:
                        row = peer.measure(workload, slots, advance).row(peer.name)
                    runs.setdefault(peer.name, []).append(row)
                except PeerFailed as failure:
                    skipped[peer.name] = str(failure)
        rows = [median_row(some) for name, some in runs.items() if name not in skipped]
        add_speedups(rows)
        names = {peer.name for peer in self.peers}
        best = max((row["output_tokens_per_s"] for row in rows if row["name"] in names), default=None)
        for row in rows:
            row["concurrency"] = slots
            row["vs_best_peer"] = row["output_tokens_per_s"] / best if best else None
        return ConcurrencyResult(slots, rows, skipped)


def median_row(rows: Sequence[Row]) -> Row:
    """The median of each figure over several runs of one engine; figures that an engine does not have stay None."""
    numeric = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    middle = {name: median(row[name] for row in rows) for name in numeric}
    return rows[0] | middle | {"output_tokens_per_s_runs": [row["output_tokens_per_s"] for row in rows]}


_workload, _peers = (partial(typer.Option, rich_help_panel=panel) for panel in ("Workload", "Peers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWorkload(WorkloadOptions):
    """The requests, and how many of them are in a step."""

    requests: Annotated[int, _workload(help="Number of requests; with --workload, the first of the file.")] = 64
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
        lengths = self.lengths()
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
            metavar="NAME=FILE", help="The Python that has the peer's package; repeatable.", show_default="this one"
        ),
    ] = None
    peer_model: Annotated[
        list[str] | None,
        _peers(
            metavar="NAME=MODEL",
            help="The model that a peer loads instead of --model; repeatable.",
            show_default="--model",
        ),
    ] = None
    peer_timeout: Annotated[float, _peers(help="Seconds for one run of a peer, loading included.")] = 900.0

    def make(self, context: typer.Context, comparison: ThroughputComparison) -> list[Peer]:
        if self.peers is None:
            refuse_given(context, ("peer_python", "peer_model", "peer_timeout"), "has no effect without --peers")
            return []
        if self.peer_timeout <= 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.peer_timeout:g}")
        names = parse_names("peers", self.peers, PEERS)
        pythons = parse_peer_paths("peer_python", self.peer_python or [], names)
        models = parse_peer_paths("peer_model", self.peer_model or [], names)
        if comparison.machine.device.type != "cpu":
            raise InvalidParameter("peers", "run on the CPU; add --device cpu")
        return [
            comparison.peer(
                name,
                timeout=self.peer_timeout,
                python=pythons.get(name, Path(sys.executable)),
                model=models.get(name, comparison.path),
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
    show_log(quiet=engine.quiet, verbose=True)
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

"""Output tokens per second: this engine, itself without batching, transformers, and peers."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.errors import InvalidParameter
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, given, refuse_given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engine_run import Measurement, TokenProgress, add_speedups
from chairlift_lab.common.workload import LengthRange, Workload, load_workload, make_workload, text_like_ids
from chairlift_lab.peers.peers import PEERS, Peer, parse_peer_paths, parse_peers
from chairlift_lab.peers.process import PeerFailed
from chairlift_lab.report.options import parse_names, parse_numbers

if TYPE_CHECKING:
    from chairlift.engine.settings import MachineSettings

ENGINES = ("chairlift", "one-at-a-time", "transformers")
OWN_ENGINES = ("chairlift", "chairlift-fp32")
ALL_ENGINES = tuple(dict.fromkeys(ENGINES + OWN_ENGINES))

Watch = Callable[[str], AbstractContextManager[TokenProgress]]
"""Shows the progress of the engine of that name."""


@dataclass(frozen=True, slots=True)
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

    def run(self, workload: Workload, watch: Watch) -> list[dict[str, Any]]:
        """Load, warm up and measure one engine after the other; return a row for each."""
        import torch

        runs = {
            "chairlift": self._run_batched,
            "chairlift-fp32": self._run_fp32,
            "one-at-a-time": self._run_one_at_a_time,
            "transformers": self._run_transformers,
        }
        self._require_accelerate()
        threads = torch.get_num_threads()
        rows = []
        for name in self.engines:
            torch.set_num_threads(threads)  # the engine before may have changed it
            with watch(name) as advance:
                rows.append(runs[name](workload, advance).row(name))
            gc.collect()
        add_speedups(rows)
        return rows

    def slots(self) -> int:
        """The most requests per step."""
        return self._machine().max_batch_requests

    def settings(self) -> dict[str, Any]:
        """The settings with all defaults resolved."""
        config, machine = self._config(), self._machine()
        return {
            "model": self.model,
            "engines": list(self.engines),
            "threads": machine.threads,
            "device": str(machine.device),
            "dtype": str(machine.dtype).removeprefix("torch."),
            "quantization": config.quantization,
            "concurrency": machine.max_batch_requests,
            "max_model_len": config.max_model_len,
            "max_batch_tokens": machine.max_batch_tokens,
            "max_prefill_tokens": config.max_prefill_tokens or machine.max_batch_tokens,
            "block_size": config.block_size,
            "kv_memory": config.kv_memory,
            "prefix_caching": config.prefix_caching,
            "attention": config.attention,
            "transformers_max_batch_tokens": self._transformers_batch_tokens(),
        }

    def vocabulary(self) -> list[int]:
        """The token ids that prompts can be made of."""
        from chairlift.loading.checkpoint import open_checkpoint
        from chairlift.loading.resolve import resolve_model
        from chairlift.loading.tokenizer import load_tokenizer

        checkpoint = open_checkpoint(resolve_model(self.model, progress=self.progress))
        return text_like_ids(load_tokenizer(checkpoint).tokenizer)

    def _require_accelerate(self) -> None:
        """Raise before the measurement if transformers could not load the model."""
        from chairlift.loading.resolve import resolve_model

        if "transformers" not in self.engines or find_spec("accelerate") is not None:
            return
        if resolve_model(self.model, progress=self.progress).suffix == ".gguf":
            problem = (
                "transformers needs the package accelerate to read GGUF files; install it or leave transformers out"
            )
            raise InvalidParameter("engines", problem)

    def _config(self, **changes: Any) -> Any:
        from chairlift.config import EngineConfig

        return EngineConfig(**(dict(self.options) | changes))

    def _machine(self, **changes: Any) -> MachineSettings:
        from chairlift.engine.settings import resolve_machine

        return resolve_machine(self._config(**changes))

    def _run_batched(self, workload: Workload, advance: TokenProgress, **changes: Any) -> Measurement:
        from chairlift.engine.startup import load_engine
        from chairlift_lab.common.engine_run import measure_engine

        config = self._config(**changes)
        loaded = load_engine(self.model, config, progress=self.progress)
        in_flight = self._machine(**changes).max_batch_requests if self.closed_loop else None
        return measure_engine(loaded.engine, workload, advance, in_flight=in_flight)

    def _run_fp32(self, workload: Workload, advance: TokenProgress) -> Measurement:
        return self._run_batched(workload, advance, quantization="none", dtype="float32")

    def _run_one_at_a_time(self, workload: Workload, advance: TokenProgress) -> Measurement:
        """The same engine with one slot."""
        return self._run_batched(workload, advance, max_batch_requests=1, prefix_caching=False)

    def _run_transformers(self, workload: Workload, advance: TokenProgress) -> Measurement:
        from chairlift.loading.resolve import resolve_model
        from chairlift_lab.peers.transformers_run import TransformersSetup, measure_transformers

        machine = self._machine()
        setup = TransformersSetup(
            checkpoint=resolve_model(self.model, progress=self.progress),
            dtype=machine.dtype,
            device=machine.device,
            max_batch_tokens=self._transformers_batch_tokens(),
            max_batch_requests=machine.max_batch_requests,
        )
        return measure_transformers(setup, workload, advance)

    def _transformers_batch_tokens(self) -> int:
        from chairlift_lab.peers.transformers_run import MAX_BATCH_TOKENS

        return self.options.get("max_batch_tokens") or MAX_BATCH_TOKENS


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConcurrencyResult:
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
        return {peer.name: self._version(peer) for peer in self.peers}

    def run(self, workload: Workload, watch: Watch) -> Iterator[ConcurrencyResult]:
        for concurrency in self.concurrencies:
            yield self._at(concurrency, workload, watch)

    def _at(self, concurrency: int | None, workload: Workload, watch: Watch) -> ConcurrencyResult:
        own = self.own if concurrency is None else self._with_concurrency(concurrency)
        slots = own.slots()
        runs: dict[str, list[Row]] = {}
        skipped = {name: str(found) for name, found in self.versions.items() if isinstance(found, PeerFailed)}
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
        rows = [median_row(of_one) for name, of_one in runs.items() if name not in skipped]
        self._compare(rows, slots)
        return ConcurrencyResult(slots, rows, skipped)

    def _with_concurrency(self, concurrency: int) -> ThroughputComparison:
        return replace(self.own, options=dict(self.own.options) | {"max_batch_requests": concurrency})

    def _compare(self, rows: list[Row], slots: int) -> None:
        add_speedups(rows)
        names = {peer.name for peer in self.peers}
        best = max((row["output_tokens_per_s"] for row in rows if row["name"] in names), default=None)
        for row in rows:
            row["concurrency"] = slots
            row["vs_best_peer"] = row["output_tokens_per_s"] / best if best else None

    @staticmethod
    def _version(peer: Peer) -> str | PeerFailed:
        try:
            return peer.version()
        except PeerFailed as failure:
            return failure


def median_row(rows: Sequence[Row]) -> Row:
    """The median of each figure over several runs of one engine; figures that an engine does not have stay None."""
    numeric = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    middle = {name: median(row[name] for row in rows) for name in numeric}
    return rows[0] | middle | {"output_tokens_per_s_runs": [row["output_tokens_per_s"] for row in rows]}


_WORKLOAD, _PEERS = "Workload", "Peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWorkload:
    """Random requests, or those of a file."""

    requests: Annotated[
        int,
        typer.Option(help="Number of requests; with --workload, the first of the file.", rich_help_panel=_WORKLOAD),
    ] = 64
    prompt_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.", rich_help_panel=_WORKLOAD),
    ] = "16:512"
    output_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Output tokens, log-uniform.", rich_help_panel=_WORKLOAD),
    ] = "16:256"
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_WORKLOAD)] = 0
    workload: Annotated[
        Path | None,
        typer.Option(
            help='Read the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.',
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Requests per step of every engine that batches; a table for each N.",
            rich_help_panel=_WORKLOAD,
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
        typer.Option(
            help=f"Other engines to compare with: {', '.join(PEERS)}. One that cannot run here is left out, with the "
            "reason.",
            rich_help_panel=_PEERS,
            show_default="none",
        ),
    ] = None
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON",
            help="The Python that has the peer's package; repeatable.",
            rich_help_panel=_PEERS,
            show_default="this one",
        ),
    ] = None
    peer_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="The model that a peer loads instead of --model; repeatable.",
            rich_help_panel=_PEERS,
            show_default="--model",
        ),
    ] = None
    peer_timeout: Annotated[
        float, typer.Option(help="Seconds for one run of a peer, loading included.", rich_help_panel=_PEERS)
    ] = 900.0

    def make(self, context: typer.Context, comparison: ThroughputComparison) -> list[Peer]:
        from chairlift.loading.resolve import resolve_model

        if self.peers is None:
            refuse_given(context, ("peer_python", "peer_model", "peer_timeout"), "has no effect without --peers")
            return []
        if self.peer_timeout <= 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.peer_timeout:g}")
        names = parse_peers(self.peers)
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

"""Starts servers with an empty kernel cache and loads them from the moment that they are ready."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.client.http import Address, HttpClient
from chairlift.errors import ChairliftError
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.serve import MAX_WAITING
from chairlift_lab.common.engines import percentile
from chairlift_lab.common.model_shapes import ShapeOptions
from chairlift_lab.common.workload import BenchRequest, LengthRange, draw_requests
from chairlift_lab.load.client import ClosedLoop, LoadClient, LoadGenerator, LoadRecord, RequestFormat
from chairlift_lab.load.figures import Latency
from chairlift_lab.load.local_server import MODEL_NAME, local_model_facts, local_server
from chairlift_lab.report.options import Counts, Positive, Settings, number_list

WARM_SECONDS = 5.0  # The load after a warm start is short: its first token counts.
LAST_SHARE = 0.25  # The last part of the load shows the steady state.
REQUEST_TIMEOUT = 600.0
METRICS_SECONDS = 10.0  # The limit for an answer of /metrics.


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartSettings(Settings):
    streams: Annotated[Counts, number_list("Requests in flight, each in a server of its own.")] = (1, 8, 32)
    seconds: Annotated[Positive, typer.Option(help="Seconds of load after /ready.")] = 60.0
    prompt_len: Annotated[str, typer.Option(help="Tokens per prompt: a number or a range such as 100:400.")] = "100:400"
    output_len: Annotated[str, typer.Option(help="Tokens per answer: a number or a range such as 100:400.")] = "100"
    seed: Annotated[int, typer.Option(help="Seed of lengths and prompts.")] = 0

    @property
    def lengths(self) -> tuple[LengthRange, LengthRange]:
        return LengthRange.parse("prompt_len", self.prompt_len), LengthRange.parse("output_len", self.output_len)


def measure_starts(
    model: str, options: Mapping[str, Any], vocabulary: Sequence[int], settings: ColdStartSettings, note: Note
) -> list[dict[str, Any]]:
    """A row for each number of streams, every one after a cold start, and one after a warm start.

    `options` are fields of `EngineConfig`, and prompts are made of the token ids in `vocabulary`.
    """

    def measure(start: str, streams: int, seconds: float) -> dict[str, Any]:
        begin = time.perf_counter()
        # Of kernels for GPUs, of those for CPUs, and of packed weights.
        caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "NUMBA_CACHE_DIR": f"{cache}/numba", "XDG_CACHE_HOME": cache}
        with local_server(model, options, max_waiting=MAX_WAITING, environment=caches) as server:
            ready = time.perf_counter() - begin
            prompts, outputs = settings.lengths
            requests = draw_requests(vocabulary, prompt_len=prompts, output_len=outputs, seed=settings.seed)
            records = asyncio.run(_load(Address.parse(server.url), requests, streams, seconds))
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=METRICS_SECONDS) as response:
                phases = start_phases(response.read().decode())
        row = {"start": start, "streams": streams, "ready_seconds": ready} | figures(records, ready, seconds)
        return row | {"phase_seconds": phases}

    rows = []
    for streams in settings.streams:
        with tempfile.TemporaryDirectory(prefix="chairlift-") as cache:
            note(f"cold start, {streams} streams")
            rows.append(measure("cold", streams, settings.seconds))
            if streams == settings.streams[-1]:
                note("warm start")
                rows.append(measure("warm", 1, min(WARM_SECONDS, settings.seconds)))
    return rows


async def _load(address: Address, requests: Iterator[BenchRequest], streams: int, seconds: float) -> list[LoadRecord]:
    with closing(HttpClient(address)) as http:
        client = LoadClient(http, RequestFormat(MODEL_NAME), timeout=REQUEST_TIMEOUT)
        return (await LoadGenerator(client.send, duration=seconds).run(requests, ClosedLoop(streams))).records


def figures(records: Sequence[LoadRecord], ready: float, seconds: float) -> dict[str, Any]:
    """The latencies of a load that began `ready` seconds after the server was started, and lasted `seconds`."""
    good = [record for record in records if record.error is None and record.times]
    if not good:
        problem = next((record.error for record in records if record.error), "no request was finished")
        raise ChairliftError(f"the server did not answer: {problem}")
    ttfts = [1e3 * Latency.of(record).ttft for record in good]
    last = [ttft for ttft, record in zip(ttfts, good, strict=True) if record.sent >= seconds * (1 - LAST_SHARE)]
    return {
        "first_token_seconds": ready + min(record.times[0] for record in good),
        "requests": len(records),
        "failed": len(records) - len(good),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "ttft_max_ms": max(ttfts),
        "last_ttft_p50_ms": percentile(last, 50) if last else None,
        "output_tokens_per_s": sum(record.output_tokens for record in good) / max(record.end for record in good),
    }


def start_phases(metrics: str) -> dict[str, float]:
    """The seconds of each phase of the engine's start, from the text of /metrics, in order."""
    phases = re.findall(r'^chairlift_engine_start_seconds\{phase="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in phases}


@contextmanager
def folder_with_tokenizer(config: str) -> Iterator[str]:
    """A folder with this config.json and a tokenizer that has a word for every token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    described = json.loads(Path(config).read_text())
    with tempfile.TemporaryDirectory(prefix="chairlift-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described))
        words = {f"w{token}": token for token in range(int(described["vocab_size"]))}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(Path(folder) / "tokenizer.json"))
        yield folder


COLUMNS = (
    Column("Start", "start"),
    Column("Streams", "streams"),
    Column("Ready\ns", "ready_seconds", ".1f"),
    Column("First\ntoken s", "first_token_seconds", ".1f"),
    Column("Requests", "requests", ","),
    Column("Failed", "failed", ","),
    Column("TTFT\np50 ms", "ttft_p50_ms", ",.1f"),
    Column("TTFT\np99 ms", "ttft_p99_ms", ",.1f"),
    Column("TTFT\nmax ms", "ttft_max_ms", ",.1f"),
    Column("TTFT p50\nat the end", "last_ttft_p50_ms", ",.1f"),
    Column("Tokens/s", "output_tokens_per_s", ",.0f"),
)


@bench(
    "cold-start",
    "chairlift bench cold-start",
    "chairlift bench cold-start --model-config qwen3-0.6b --device cuda --json result.json",
    "chairlift bench cold-start Qwen/Qwen3-0.6B --streams 1,8,32 --seconds 60",
)
def bench_cold_start(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    note: Note,
    settings: ColdStartSettings,
) -> BenchResult:
    """The first minute of a server whose kernels are not compiled yet.

    Every server is started with an empty kernel cache and loaded from the
    moment that /ready answers: the next request of a stream is sent when the
    last one has ended. The last server is started again with its kernels in
    the cache. Times to ready and to the first token are counted from the
    start of the process.
    """
    _ = settings.lengths  # raises if one is no range
    with _target(context, engine, shape) as (model, options, name, vocabulary):
        rows = measure_starts(model, options, vocabulary, settings, note)
    tables = [Table(f"{name}: cold starts", COLUMNS, rows), phase_table(rows)]
    return BenchResult({"model": name} | asdict(settings) | {"engine": options}, rows, tables)


def phase_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Where the time until /ready went."""
    phases = [*dict.fromkeys(phase for row in rows for phase in row["phase_seconds"])]
    figures = [
        {"start": row["start"], "streams": row["streams"]}
        | {phase: row["phase_seconds"].get(phase) for phase in phases}
        | {"sum": sum(row["phase_seconds"].values()), "ready": row["ready_seconds"]}
        for row in rows
    ]
    columns = [Column(phase.replace("_", "\n"), phase, ".2f") for phase in (*phases, "sum", "ready")]
    title = "seconds of the engine's start, from the start of its process to ready"
    return Table(title, [Column("Start", "start"), Column("Streams", "streams"), *columns], figures)


@contextmanager
def _target(
    context: typer.Context, engine: EngineOptions, shape: ShapeOptions
) -> Iterator[tuple[str, dict[str, Any], str, Sequence[int]]]:
    """The model to serve, its options, its display name and the token ids of prompts."""
    with shape.resolve(context, engine) as (path, config, name):
        options = engine.config() | {"load_format": config.load_format}
        if config.load_format != "dummy":
            vocabulary, _ = local_model_facts(path, options, progress=not engine.quiet)
            yield path, options, name, vocabulary
            return
        with folder_with_tokenizer(path) as folder:
            yield folder, options, name, range(1, 1000)

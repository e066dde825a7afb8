"""`chairlift bench soak`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chairlift.byte_sizes import parse_bytes
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.soak.resources import memory_growth
from chairlift_lab.bench.soak.run import SoakFailed, SoakFigures, SoakPlan, soak
from chairlift_lab.common.measure import percentile

DEFAULTS = {
    "speculate": "ngram",
    "batch_invariant": True,  # otherwise rounding depends on the batch, and close decisions of greedy answers with it
    "kv_memory": "128MiB",  # the warm-up writes all of it
}
REQUEST_COLUMNS = (
    Column("Requests", "name"),
    Column("Count", "requests", ",d"),
    Column("p50", "seconds_p50", ",.0f", 1000, " ms"),
    Column("p95", "seconds_p95", ",.0f", 1000, " ms"),
)
PROCESS_COLUMNS = (
    Column("Process", "name"),
    Column("Memory", "memory", ",.0f", 2**-20, " MiB"),
    Column("Growth", "memory_growth", "+,.1f", 2**-20, " MiB"),
    Column("Files before", "files_before", "d"),
    Column("after", "files_after", "d"),
    Column("Threads before", "threads_before", "d"),
    Column("after", "threads_after", "d"),
)


@bench(
    "soak",
    "chairlift bench soak",
    "chairlift bench soak --seconds 60 --json result.json",
    "chairlift bench soak --model Qwen/Qwen3-0.6B --load 0.9",
    "chairlift bench soak --replicas 2",
)
def bench_soak(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    seconds: Annotated[float, typer.Option(help="Duration of the traffic.", min=1)] = 600.0,
    load: Annotated[float, typer.Option(help="Share of the server's capacity.", min=0.01, max=1)] = 0.7,
    calibration_seconds: Annotated[
        float, typer.Option(help="Duration of the measurement of the capacity.", min=1)
    ] = 30.0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight to measure the capacity.", min=1)] = 16,
    memory_tolerance: Annotated[str, typer.Option(help="How much the memory of a process may grow.")] = "32MiB",
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
    replicas: Annotated[
        int, typer.Option(help="Replicas of a fleet on Ray, behind its ingress; 0 for a single server.", min=0)
    ] = 0,
) -> BenchResult:
    """Mixed traffic on a server or a fleet for a long time; fails if anything fails, changes or grows.

    Requests of many kinds (greedy, sampled, structured, tools, cancelled,
    killed connections, invalid, …) arrive at random times. There must be no
    5xx, greedy answers must stay the same, structured ones must match their
    schema, and the memory, file descriptors and threads of all processes must
    not grow. Unless given, the options are --speculate ngram,
    --batch-invariant and --kv-memory 128MiB.
    """
    options = engine.config() | {name: value for name, value in DEFAULTS.items() if not given(context, name)}
    tolerance = parse_bytes("memory_tolerance", memory_tolerance)
    plan = SoakPlan(seconds, load, calibration_seconds, concurrency, tolerance, seed)
    found = soak(engine.model, options, plan, note, replicas=replicas)
    requests = [_request_row(kind, times) for kind, times in sorted(found.kinds.items())]
    processes = [_process_row(role, found) for role in found.resources]
    title = f"{engine.model}: {found.seconds:,.0f} s at {found.rate:.1f} requests/s ({load:.0%} of the capacity)"
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(found.statuses.items()))
    tables = [Table(title, REQUEST_COLUMNS, requests, statuses), Table("", PROCESS_COLUMNS, processes)]
    if found.problems:
        for table in tables:
            table.show()
        raise SoakFailed("; ".join(found.problems))
    settings = {"model": engine.model, "replicas": replicas, "rate": found.rate, "engine": options} | asdict(plan)
    return BenchResult(settings, [*requests, *processes], [*tables, Line("All checks passed.")])


def _request_row(kind: str, times: Sequence[float]) -> dict[str, Any]:
    figures = {f"seconds_p{share}": percentile(times, share) for share in (50, 95)}
    return {"name": kind, "requests": len(times)} | figures


def _process_row(role: str, found: SoakFigures) -> dict[str, Any]:
    samples, before, after = found.resources[role], found.idle_before[role], found.idle_after[role]
    return {
        "name": role,
        "memory": samples[-1].memory,
        "memory_growth": memory_growth(samples),
        "files_before": before.files,
        "files_after": after.files,
        "threads_before": before.threads,
        "threads_after": after.threads,
    }

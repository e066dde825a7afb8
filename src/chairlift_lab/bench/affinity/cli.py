"""`chairlift bench affinity`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench

COLUMNS = (
    Column("Fleet", "name"),
    Column("Replicas", "replicas"),
    Column("Cached", "cached_share", ".1%"),
    Column("predicted", "predicted_cached_share", ".1%"),
    Column("TTFT\np50 ms", "ttft_p50_ms", ",.0f"),
    Column("predicted", "predicted_ttft_p50_ms", ",.0f"),
    Column("outside\nengine", "outside_engine_ms", ",.0f"),
    Column("Most loaded\nto least", "imbalance", ".2f"),
)


@bench(
    "affinity",
    "chairlift bench affinity --rate 1",
    "OMP_NUM_THREADS=1 chairlift bench profile --out profile.json",
    "chairlift bench affinity --rate 1 --profile profile.json",
)
def bench_affinity(
    engine: EngineOptions,
    note: Note,
    groups: Annotated[int, typer.Option(help="Prefixes that requests share.")] = 8,
    per_group: Annotated[int, typer.Option(help="Requests with each prefix.")] = 12,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of a shared prefix.")] = 500,
    own_tokens: Annotated[int, typer.Option(help="Tokens of each prompt after its prefix.")] = 30,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each output.")] = 16,
    rate: Annotated[float, typer.Option(help="Requests per second, with random gaps.")] = 1.0,
    replicas: Annotated[int, typer.Option(help="Replicas of the fleet.")] = 2,
    profile: Annotated[
        Path | None,
        typer.Option(help="Prices of `bench profile`, to predict times too.", show_default="predict no times"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    address: Annotated[str, typer.Option(help="Ray cluster; local starts one.")] = "local",
) -> BenchResult:
    """The cached share of prompts with shared prefixes, by router, measured and simulated.

    The same requests go to one replica, and to a fleet with the routers
    prefix-affine and round-robin. In the last run all of them share one prefix
    and come as fast as they are answered: its home must not get all the work.
    The simulator runs the same router on the same requests. It has engines
    only: what a request takes outside of them is measured with requests of one
    at a time before each run, and added. Needs chairlift[ray].
    """
    from chairlift_lab.bench.affinity.run import AffinitySettings, measure_affinity

    counts = {"groups": groups, "per_group": per_group, "prefix_tokens": prefix_tokens, "own_tokens": own_tokens}
    for name, value in (counts | {"output_tokens": output_tokens, "replicas": replicas}).items():
        if value < 1:
            raise InvalidParameter(name, f"must be at least 1, got {value}")
    if not rate > 0:
        raise InvalidParameter("rate", f"must be above 0, got {rate}")
    settings = AffinitySettings(**counts, output_tokens=output_tokens, rate=rate, replicas=replicas, seed=seed)
    rows = measure_affinity(engine, settings, profile, address, note)
    shown = {"model": engine.model, "profile": None if profile is None else str(profile)}
    return BenchResult(asdict(settings) | shown, rows, [Table("Prefix affinity", COLUMNS, rows)])

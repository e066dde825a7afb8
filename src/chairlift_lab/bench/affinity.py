"""The cached share of prompts in a fleet, measured on real fleets and predicted by the simulator."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.client.http import Address, HttpClient
from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.ray_runtime import connect
from chairlift.cluster.routing.router import Router
from chairlift.core.targets import Targets
from chairlift.errors import ChairliftError
from chairlift.progress import Note
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.client import (
    ClosedLoop,
    LoadClient,
    LoadGenerator,
    LoadLoop,
    LoadRecord,
    OpenLoop,
    RequestFormat,
)
from chairlift_lab.load.local_server import MODEL_NAME, free_port, local_fleet
from chairlift_lab.load.traces import Arrivals
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.report.options import Count, Positive, Settings
from chairlift_lab.simulator.outcome import Arrival, figures, percentile
from chairlift_lab.simulator.simulation import simulate
from chairlift_lab.simulator.step_cost import MeasuredCost, StepCost

FLEET = "chairlift-bench"
LONE_REQUESTS = 13  # They run first and share a prefix: the simulator does not know what a request takes.
LONE_GAP = 1.0  # seconds between them, longer than any of them takes
LONE_TIMES = [LONE_GAP * index for index in range(LONE_REQUESTS)]
HOT_CONCURRENCY = 4  # requests in flight for each replica, in the run with one prefix
TOKENS = range(100, 250)  # ids that every vocabulary has
REPORT_SECONDS = 3.0  # The replicas have reported their counts by then.
TIMEOUT = 600.0
PREDICTIONS = ("predicted_cached_share", "predicted_ttft_p50_ms", "outside_engine_ms")
DEFAULTS = ReplicaSettings(num_blocks=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinitySettings(Settings):
    groups: Annotated[Count, typer.Option(help="Prefixes that requests share.")] = 8
    per_group: Annotated[Count, typer.Option(help="Requests with each prefix.")] = 12
    prefix_tokens: Annotated[Count, typer.Option(help="Tokens of a shared prefix.")] = 500
    own_tokens: Annotated[Count, typer.Option(help="Tokens of each prompt after its prefix.")] = 30
    output_tokens: Annotated[Count, typer.Option(help="Tokens of each output.")] = 16
    rate: Annotated[Positive, typer.Option(help="Requests per second, with random gaps.")] = 1.0
    replicas: Annotated[Count, typer.Option(help="Replicas of the fleet.")] = 2
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0

    def requests(self) -> list[BenchRequest]:
        """In random order, as many of each group."""
        source = random.Random(f"affinity {self.seed}")
        prefixes = [source.choices(TOKENS, k=self.prefix_tokens) for _ in range(self.groups)]
        groups = [index % self.groups for index in range(self.groups * self.per_group)]
        source.shuffle(groups)
        return [
            BenchRequest((*prefixes[group], *source.choices(TOKENS, k=self.own_tokens)), self.output_tokens)
            for group in groups
        ]

    def lone_requests(self) -> list[BenchRequest]:
        """Prompts that share a prefix of their own, with one token of output."""
        source = random.Random(f"lone {self.seed}")
        prefix = source.choices(TOKENS, k=self.prefix_tokens)
        return [BenchRequest((*prefix, *source.choices(TOKENS, k=self.own_tokens)), 1) for _ in range(LONE_REQUESTS)]

    def times(self) -> list[float]:
        arrivals = Arrivals.parse(self.rate, "poisson", None)
        return list(islice(arrivals.times(self.seed), self.groups * self.per_group))


@dataclass(frozen=True, slots=True)
class _Measured:
    records: Sequence[LoadRecord]
    loads: Sequence[dict[str, Any]]  # The loads of the replicas after the run.
    lone: Sequence[LoadRecord]  # requests of one at a time; none where nothing is predicted


def measure_affinity(
    engine: EngineOptions,
    settings: AffinitySettings,
    profile: Path | None,
    address: str,
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    cost = None if profile is None else MeasuredCost.load(profile)
    connect(address, log_to_driver=False)
    hot = replace(settings, groups=1, per_group=settings.groups * settings.per_group)
    open_loop = OpenLoop(lambda: iter(settings.times()))
    runs: list[tuple[str, str, int, AffinitySettings, LoadLoop]] = [
        ("one replica", "prefix-affine", 1, settings, open_loop),
        ("prefix-affine", "prefix-affine", settings.replicas, settings, open_loop),
        ("round-robin", "round-robin", settings.replicas, settings, open_loop),
        ("one hot prefix", "prefix-affine", settings.replicas, hot, ClosedLoop(HOT_CONCURRENCY * settings.replicas)),
    ]
    rows = []
    for name, router, count, traffic, loop in runs:
        note(name)
        measured = _measure(engine, traffic, router, count, loop)
        row = {"name": name, "replicas": count, **_figures(measured)}
        predicted = _predict(engine, traffic, router, count, cost, measured) if measured.lone else None
        rows.append(row | (predicted or dict.fromkeys(PREDICTIONS)))
    return rows


def _figures(measured: _Measured) -> dict[str, Any]:
    records = measured.records
    work = [load["prompt_tokens"] - load["cached_tokens"] + load["output_tokens"] for load in measured.loads]
    return {
        "requests": len(records),
        "cached_share": sum(one.cached_tokens for one in records) / sum(one.input_tokens for one in records),
        "ttft_p50_ms": _ttft_p50_ms(records),
        "imbalance": max(work) / max(1, min(work)) if len(work) > 1 else None,
    }


def _ttft_p50_ms(records: Sequence[LoadRecord]) -> float:
    return 1e3 * percentile([one.times[0] - one.due for one in records], 50)


def _measure(engine: EngineOptions, settings: AffinitySettings, router: str, count: int, loop: LoadLoop) -> _Measured:
    from chairlift.cluster.serving.fleet import fleet_config

    server = ServerOptions(port=free_port(), served_model_name=[MODEL_NAME], drain_timeout=1.0)
    config = fleet_config(server, engine.model, engine.config(), quiet=True)
    with local_fleet(FLEET, config, ClusterOptions(replicas=count, router=router)) as (url, status):
        alone = OpenLoop(lambda: iter(LONE_TIMES))
        lone = asyncio.run(_send(url, settings.lone_requests(), alone)) if isinstance(loop, OpenLoop) else ()
        records = asyncio.run(_send(url, settings.requests(), loop))
        time.sleep(REPORT_SECONDS)
        return _Measured(records, [replica["load"] | replica for replica in status()["replicas"]], lone)


async def _send(url: str, requests: Sequence[BenchRequest], loop: LoadLoop) -> Sequence[LoadRecord]:
    client = LoadClient(HttpClient(Address.parse(url)), RequestFormat(MODEL_NAME), timeout=TIMEOUT)
    run = await LoadGenerator(client.send).run(requests, loop)
    if failed := [record.error for record in run.records if record.error]:
        raise ChairliftError(f"{len(failed)} requests failed: {failed[0]}")
    return run.records


def _predict(
    engine: EngineOptions,
    settings: AffinitySettings,
    router: str,
    count: int,
    cost: StepCost | None,
    measured: _Measured,
) -> dict[str, Any]:
    """Simulate the run; without measured prices the times mean nothing, but the hit rate hardly depends on them.

    The simulator has engines only. What clients, ingress, servers and waking an idle engine add is known from the lone
    requests.
    """
    from chairlift_lab.planning.machine import model_shape, read_config
    from chairlift_lab.simulator.step_cost import Roofline, device_named

    prices = cost or Roofline(model_shape(read_config("smollm2-135m"), "int8", "bfloat16"), device_named("cpu"))
    block_size = engine.block_size
    replica = ReplicaSettings(
        num_blocks=measured.loads[0]["num_tokens"] // block_size,
        block_size=block_size,
        prefix_caching=True,
        slots=engine.max_batch_requests or DEFAULTS.slots,
        max_batch_tokens=engine.max_batch_tokens or DEFAULTS.max_batch_tokens,
    )

    def run(times: Sequence[float], requests: Sequence[BenchRequest]) -> dict[str, Any]:
        arrivals = [Arrival(at, request.prompt_ids, request.n_out) for at, request in zip(times, requests, strict=True)]
        engines = [replica.make(prices, index / count) for index in range(count)]
        return figures(simulate(arrivals, engines, Router(router)), Targets())

    predicted = run(settings.times(), settings.requests())
    lone = run(LONE_TIMES, settings.lone_requests())
    outside = max(0.0, _ttft_p50_ms(measured.lone) - lone["ttft_p50_ms"])
    return {
        "predicted_cached_share": predicted["cached_share"],
        "predicted_ttft_p50_ms": None if cost is None else predicted["ttft_p50_ms"] + outside,
        "outside_engine_ms": None if cost is None else outside,
    }


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
    settings: AffinitySettings,
    profile: Annotated[
        Path | None,
        typer.Option(help="Prices of `bench profile`, to predict times too.", show_default="predict no times"),
    ] = None,
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
    rows = measure_affinity(engine, settings, profile, address, note)
    shown = {"model": engine.model, "profile": None if profile is None else str(profile)}
    return BenchResult(asdict(settings) | shown, rows, [Table("Prefix affinity", COLUMNS, rows)])

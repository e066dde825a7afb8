"""A light tenant alone on a server, and beside a tenant that floods it within the rules."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from chairlift.client.http import Address, HttpClient
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import percentile
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.client import LoadClient, LoadGenerator, LoadRecord, OpenLoop, RequestFormat
from chairlift_lab.load.local_server import MODEL_NAME, local_model_facts, local_server

TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """The requests of one tenant."""

    name: str
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What both tenants send, and for how long."""

    seconds: Annotated[float, typer.Option(help="Duration of the flood.", min=1)] = 60.0
    idle_seconds: Annotated[float, typer.Option(help="Duration of the measurement without a flood.", min=1)] = 20.0
    interval: Annotated[float, typer.Option(help="Seconds between requests of the light tenant.", min=0.01)] = 1.0
    concurrency: Annotated[int, typer.Option(help="Requests of the heavy tenant in flight.", min=1)] = 400
    max_waiting: Annotated[int, typer.Option(help="Completions that may wait in the server's queue.", min=0)] = 256
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of the light tenant.", min=1)] = 128
    heavy_prompt_len: Annotated[int, typer.Option(help="Prompt tokens of the heavy tenant.", min=1)] = 300
    output_len: Annotated[int, typer.Option(help="Tokens to generate, of both.", min=1)] = 32
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0

    @property
    def light(self) -> TenantLoad:
        return TenantLoad("light", self.prompt_len, self.output_len)

    @property
    def heavy(self) -> TenantLoad:
        return TenantLoad("heavy", self.heavy_prompt_len, self.output_len)

    def settings(self) -> dict[str, Any]:
        names = ("interval", "concurrency", "idle_seconds", "seconds", "seed")
        tenants = {"light": asdict(self.light), "heavy": asdict(self.heavy)}
        return tenants | {name: getattr(self, name) for name in names}


Figures = dict[str, list[LoadRecord]]
"""The requests of the light tenant before the flood and during it, and of the heavy one, by the name of their row."""


async def _measure(address: Address, vocabulary: Sequence[int], flood: Flood, note: Note) -> Figures:
    crowd_records: list[LoadRecord] = []
    with closing(HttpClient(address)) as http:
        light, heavy = _client(http, flood.light), _client(http, flood.heavy)
        requests = _requests(flood.light, vocabulary, random.Random(flood.seed))
        note("warming up")
        await _send_regularly(light, requests, flood.interval / 4, 8 * flood.interval / 4)
        note(f"the light tenant alone, {flood.idle_seconds:g} s")
        alone = await _send_regularly(light, requests, flood.interval, flood.idle_seconds)
        note(f"beside a flood, {flood.seconds:g} s")
        end = asyncio.get_running_loop().time() + flood.seconds
        crowd_requests = _requests(flood.heavy, vocabulary, random.Random(flood.seed + 1))
        crowd = [
            asyncio.create_task(_flood(heavy, crowd_requests, end, crowd_records)) for _ in range(flood.concurrency)
        ]
        beside = await _send_regularly(light, requests, flood.interval, flood.seconds)
        for task in crowd:  # what the crowd has in flight does not matter any more
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return {"light, alone": alone, "light, flooded": beside, "heavy": crowd_records}


def _client(http: HttpClient, tenant: TenantLoad) -> LoadClient:
    """Without API keys, the `user` of a request is its tenant."""
    return LoadClient(http, RequestFormat(MODEL_NAME, extra={"user": tenant.name}), timeout=TIMEOUT)


def _requests(tenant: TenantLoad, vocabulary: Sequence[int], rng: random.Random) -> Iterator[BenchRequest]:
    """Endless requests without a common prefix."""
    while True:
        yield BenchRequest(tuple(rng.choices(vocabulary, k=tenant.prompt_len)), tenant.output_len)


async def _send_regularly(
    client: LoadClient, requests: Iterator[BenchRequest], interval: float, seconds: float
) -> list[LoadRecord]:
    generator = LoadGenerator(client.send, duration=seconds)
    times = OpenLoop(lambda: (interval * number for number in range(int(seconds / interval) + 1)))
    return (await generator.run(requests, times)).records


async def _flood(client: LoadClient, requests: Iterator[BenchRequest], end: float, records: list[LoadRecord]) -> None:
    """Send requests one after the other until `end`; after a refusal, wait as long as the server asks."""
    clock = asyncio.get_running_loop().time
    while clock() < end:
        record = LoadRecord(due=clock(), sent=clock())
        records.append(record)
        await client.send(next(requests), record, clock)
        await asyncio.sleep(record.retry_after or 0.0)


COLUMNS = (
    Column("Tenant", "name"),
    Column("Requests", "requests", ",d"),
    Column("Answered", "answered", ",d"),
    Column("Refused", "refused", ",d"),
    Column("Failed", "failed", ",d"),
    Column("TTFT p50", "ttft_p50", ",.0f", 1000, " ms"),
    Column("TTFT p95", "ttft_p95", ",.0f", 1000, " ms"),
)


@bench(
    "tenants",
    "chairlift bench tenants",
    "chairlift bench tenants --seconds 20 --order fcfs",
    "chairlift bench tenants --max-waiting 64 --concurrency 200 --json result.json",
)
def bench_tenants(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    flood: Flood,
) -> BenchResult:
    """What one tenant notices of another that floods the server, but waits after each refusal as it is asked to.

    A server with --order fair (unless another order is given) is started for
    the run. The light tenant sends a request every --interval seconds, first
    alone and then beside the flood.
    """
    options = engine.config()
    if not given(context, "order"):
        options["order"] = "fair"
    vocabulary, _ = local_model_facts(engine.model, options, progress=not engine.quiet)
    with local_server(engine.model, options, max_waiting=flood.max_waiting) as server:
        records = asyncio.run(_measure(Address.parse(server.url), vocabulary, flood, note))
    rows = [_row(name, some) for name, some in records.items()]
    title = f"{engine.model}: a flood of {flood.concurrency} requests, order {options['order']}"
    settings = {"model": engine.model, "max_waiting": flood.max_waiting, "engine": options} | flood.settings()
    return BenchResult(settings, rows, [Table(title, COLUMNS, rows), Line(_verdict(rows))])


def _row(name: str, records: Sequence[LoadRecord]) -> dict[str, Any]:
    ended = [record for record in records if record.end]
    refused = sum(record.error is not None and record.error.startswith("HTTP 429") for record in ended)
    answered = [record for record in ended if record.error is None]
    ttfts = [record.times[0] - record.due for record in answered if record.times]
    return {
        "name": name,
        "requests": len(ended),
        "answered": len(answered),
        "refused": refused,
        "failed": len(ended) - len(answered) - refused,
        "ttft_p50": percentile(ttfts, 50) if ttfts else None,
        "ttft_p95": percentile(ttfts, 95) if ttfts else None,
    }


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    alone, flooded, _ = rows
    accepted = f"{flooded['answered']} of {flooded['requests']} requests of the light tenant were answered"
    if alone["ttft_p95"] is None or flooded["ttft_p95"] is None:
        return f"{accepted}."
    ratio = flooded["ttft_p95"] / alone["ttft_p95"]
    return f"{accepted}; its p95 time to first token is {ratio:.2f} times that without the flood."

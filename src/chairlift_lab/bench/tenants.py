"""A light tenant alone on a server, and beside a tenant that floods it within the rules."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from chairlift.client.http import Address, HttpClient
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import percentile
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.client import ClosedLoop, LoadClient, LoadGenerator, LoadRecord, OpenLoop, RequestFormat
from chairlift_lab.load.local_server import MODEL_NAME, local_model_facts, local_server

TIMEOUT = 600.0


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

    def tenants(self) -> dict[str, dict[str, Any]]:
        """The requests of each tenant, by its name."""
        prompts = {"light": self.prompt_len, "heavy": self.heavy_prompt_len}
        return {
            name: {"name": name, "prompt_len": length, "output_len": self.output_len}
            for name, length in prompts.items()
        }

    def requests(self, tenant: str, vocabulary: Sequence[int], seed: int) -> Iterator[BenchRequest]:
        """Endless requests without a common prefix."""
        rng, load = random.Random(seed), self.tenants()[tenant]
        while True:
            yield BenchRequest(tuple(rng.choices(vocabulary, k=load["prompt_len"])), load["output_len"])


Figures = dict[str, list[LoadRecord]]
"""The requests of the light tenant before the flood and during it, and of the heavy one, by the name of their row."""


async def _measure(address: Address, vocabulary: Sequence[int], flood: Flood, note: Note) -> Figures:
    with closing(HttpClient(address)) as http:
        # Without API keys, the `user` of a request is its tenant.
        light, heavy = (
            LoadClient(http, RequestFormat(MODEL_NAME, extra={"user": name}), timeout=TIMEOUT)
            for name in flood.tenants()
        )
        requests = flood.requests("light", vocabulary, flood.seed)

        async def send_politely(request: BenchRequest, record: LoadRecord, now: Callable[[], float]) -> None:
            """After a refusal, wait as long as the server asks."""
            await heavy.send(request, record, now)
            await asyncio.sleep(record.retry_after or 0.0)

        note("warming up")
        await _send_regularly(light, requests, flood.interval / 4, 8 * flood.interval / 4)
        note(f"the light tenant alone, {flood.idle_seconds:g} s")
        alone = await _send_regularly(light, requests, flood.interval, flood.idle_seconds)
        note(f"beside a flood, {flood.seconds:g} s")
        crowd = LoadGenerator(send_politely, duration=flood.seconds)
        crowd_requests = flood.requests("heavy", vocabulary, flood.seed + 1)
        crowding = asyncio.create_task(crowd.run(crowd_requests, ClosedLoop(flood.concurrency)))
        beside = await _send_regularly(light, requests, flood.interval, flood.seconds)
        crowding.cancel()  # what the crowd has in flight does not matter any more
        await asyncio.gather(crowding, return_exceptions=True)
        return {"light, alone": alone, "light, flooded": beside, "heavy": crowd.records}


async def _send_regularly(
    client: LoadClient, requests: Iterator[BenchRequest], interval: float, seconds: float
) -> list[LoadRecord]:
    generator = LoadGenerator(client.send, duration=seconds)
    times = OpenLoop(lambda: (interval * number for number in range(int(seconds / interval) + 1)))
    return (await generator.run(requests, times)).records


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
    settings = {"model": engine.model, "max_waiting": flood.max_waiting, "engine": options} | flood.tenants()
    settings |= {name: getattr(flood, name) for name in ("interval", "concurrency", "idle_seconds", "seconds", "seed")}
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

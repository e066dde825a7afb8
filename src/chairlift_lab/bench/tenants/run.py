"""A light tenant alone on a server, and beside a tenant that floods it within the rules."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.client.http import Address, HttpClient
from chairlift.progress import Note
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.client import LoadClient, RequestFormat
from chairlift_lab.load.local_server import MODEL_NAME, local_server
from chairlift_lab.load.run import LoadGenerator, LoadRecord, OpenLoop

TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """The requests of one tenant."""

    name: str
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Flood:
    """What both tenants send, and for how long."""

    light: TenantLoad
    heavy: TenantLoad
    interval: float  # seconds between two requests of the light tenant
    concurrency: int  # requests of the heavy tenant in flight
    idle_seconds: float
    seconds: float
    seed: int = 0


@dataclass(slots=True)
class FloodFigures:
    alone: list[LoadRecord] = field(default_factory=list)  # of the light tenant, before the flood
    beside: list[LoadRecord] = field(default_factory=list)  # of the light tenant, during the flood
    heavy: list[LoadRecord] = field(default_factory=list)


def measure_flood(
    model: str, options: Mapping[str, Any], vocabulary: Sequence[int], flood: Flood, max_waiting: int, note: Note
) -> FloodFigures:
    with local_server(model, options, max_waiting=max_waiting) as server:
        return asyncio.run(_measure(Address.parse(server.url), vocabulary, flood, note))


async def _measure(address: Address, vocabulary: Sequence[int], flood: Flood, note: Note) -> FloodFigures:
    http, figures = HttpClient(address), FloodFigures()
    light, heavy = _client(http, flood.light), _client(http, flood.heavy)
    requests = _requests(flood.light, vocabulary, random.Random(flood.seed))
    try:
        note("warming up")
        await _send_regularly(light, requests, flood.interval / 4, 8 * flood.interval / 4)
        note(f"the light tenant alone, {flood.idle_seconds:g} s")
        figures.alone = await _send_regularly(light, requests, flood.interval, flood.idle_seconds)
        note(f"beside a flood, {flood.seconds:g} s")
        end = asyncio.get_running_loop().time() + flood.seconds
        crowd_requests = _requests(flood.heavy, vocabulary, random.Random(flood.seed + 1))
        crowd = [
            asyncio.create_task(_flood(heavy, crowd_requests, end, figures.heavy)) for _ in range(flood.concurrency)
        ]
        figures.beside = await _send_regularly(light, requests, flood.interval, flood.seconds)
        for task in crowd:  # what the crowd has in flight does not matter any more
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return figures
    finally:
        http.close()


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

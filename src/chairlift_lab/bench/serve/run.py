"""A load on a server, and the same load on the engine alone for comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from chairlift.client.http import Address, HttpClient
from chairlift.errors import ChairliftError
from chairlift_lab.common.workload import BenchRequest, Workload
from chairlift_lab.load.client import LoadClient, RequestFormat
from chairlift_lab.load.local_server import MODEL_NAME, local_server
from chairlift_lab.load.offline_worker import run_offline
from chairlift_lab.load.run import ClosedLoop, LoadGenerator, LoadLoop, LoadProgress, LoadRun

SHOW_SECONDS = 0.25
MAX_WAITING = 100_000  # in our server's queue: overload shows as latency, not as refused requests

WatchLoad = Callable[[str], AbstractContextManager[LoadProgress]]
"""Shows the progress of a run, given its name."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests and their loop; `requests` may be endless if there is a duration."""

    requests: Callable[[], Iterable[BenchRequest]]  # the same ones each time
    loop: LoadLoop
    duration: float | None = None
    warm_up: int = 4
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A running server."""

    address: Address
    request_format: RequestFormat
    api_key: str | None = None
    cpu_seconds: Callable[[], Mapping[str, float]] = field(default=dict)  # of its processes so far, if known


def measure_server(target: ServerTarget, plan: LoadPlan, advance: LoadProgress) -> LoadRun:
    return asyncio.run(_measure(target, plan, advance))


async def _measure(target: ServerTarget, plan: LoadPlan, advance: LoadProgress) -> LoadRun:
    http = HttpClient(target.address, api_key=target.api_key)
    client = LoadClient(http, target.request_format, timeout=plan.timeout)
    try:
        await _warm_up(client, plan)
        client.num_pieces, before = 0, target.cpu_seconds()
        load = LoadGenerator(client.send, duration=plan.duration)
        shown = asyncio.create_task(_show(load, client, advance))
        run = await load.run(plan.requests(), plan.loop)
        shown.cancel()
        advance(len(run.records), 0, client.num_pieces)
        run.cpu_seconds |= {name: used - before.get(name, 0.0) for name, used in target.cpu_seconds().items()}
        return run
    finally:
        http.close()


async def _warm_up(client: LoadClient, plan: LoadPlan) -> None:
    some = Workload(tuple(islice(plan.requests(), plan.warm_up))).warm_up(plan.warm_up)
    run = await LoadGenerator(client.send).run(some.requests, ClosedLoop(plan.warm_up))
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise ChairliftError(f"the server at {client.address} does not answer as it should: {failed[0]}")


async def _show(load: LoadGenerator, client: LoadClient, advance: LoadProgress) -> None:
    while True:
        advance(len(load.records) - load.num_open, load.num_open, client.num_pieces)
        await asyncio.sleep(SHOW_SECONDS)


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server of ours, started for each run; `options` are fields of `EngineConfig`."""

    model: str
    request_format: RequestFormat  # its model name is replaced
    options: Mapping[str, Any]

    def run(self, plan: LoadPlan, watch: WatchLoad) -> LoadRun:
        request_format = replace(self.request_format, model=MODEL_NAME)
        with (
            watch("server") as advance,
            local_server(self.model, self.options, max_waiting=MAX_WAITING) as server,
        ):
            target = ServerTarget(Address.parse(server.url), request_format, cpu_seconds=server.cpu_seconds)
            return measure_server(target, plan, advance)

    def run_offline(self, plan: LoadPlan, watch: WatchLoad) -> LoadRun:
        workload = Workload(tuple(plan.requests()))
        with watch("offline") as advance:
            return run_offline(self.model, self.options, workload, plan.loop, plan.warm_up, advance)

    def compare(self, plan: LoadPlan, repeat: int, watch: WatchLoad) -> dict[str, list[LoadRun]]:
        """Both, `repeat` times, in turns, so that other load on the machine affects both."""
        runs: dict[str, list[LoadRun]] = {"server": [], "offline": []}
        for name in turns(repeat):
            runs[name].append(self.run(plan, watch) if name == "server" else self.run_offline(plan, watch))
        return runs


def turns(repeat: int) -> Iterator[str]:
    """server offline, offline server, server offline, …"""
    pair = ["server", "offline"]
    for index in range(repeat):
        yield from pair[:: -1 if index % 2 else 1]

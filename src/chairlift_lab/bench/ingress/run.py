"""Streams of stub engines on three paths: from the servers, through the ingress, and through Ray Serve."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.ray_runtime import connect
from chairlift.errors import ChairliftError
from chairlift.server.config import ServerConfig
from chairlift.server.wire.limits import Limits
from chairlift_lab.bench.front_end.run import start_reader

FLEET, PROXIED = "chairlift-bench", "chairlift-bench-handle"
STUB = "chairlift_lab.bench.front_end.stub_engine"
WARM_UP_TOKENS = 5

Endpoint = tuple[str, str]
"""Address and API key."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    model: str  # whose tokenizer the servers load
    streams: Sequence[int]
    tokens: int  # per stream
    token_ms: float  # between the tokens of a stream
    replicas: int
    repeat: int


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: int
    seconds: float  # from the first request to the last byte
    events: int
    first_ms: Sequence[float]  # to the first token of each stream


def measure_ingress(settings: IngressSettings, address: str, note: Callable[[str], None]) -> list[dict[str, Any]]:
    connect(address, log_to_driver=False)
    port = _start_serve()
    rows = []
    for streams in settings.streams:
        note(f"starting the fleet for {streams} streams")
        with _fleet(settings, streams) as (ingress, replicas), _handle_streaming(settings, port) as proxied:
            paths = {"direct": replicas, "ingress": [ingress], "Ray handle": [proxied]}
            found: dict[str, list[_Run]] = {name: [] for name in paths}
            for endpoints in paths.values():
                _read(endpoints, streams, WARM_UP_TOKENS)
            for round_number in range(settings.repeat):  # in turn, so that a disturbance meets all
                note(f"{streams} streams, round {round_number + 1}")
                for name, endpoints in paths.items():
                    found[name].append(_read(endpoints, streams, settings.tokens))
            rows += [{"path": name, "streams": streams, **_figures(runs)} for name, runs in found.items()]
    return rows


def _start_serve() -> int:
    """Start Ray Serve with its HTTP proxy on a free port, which is returned."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return port


def _read(endpoints: Sequence[Endpoint], streams: int, tokens: int) -> _Run:
    """Read the streams, in equal shares of the endpoints, by one process for each."""
    counts = [streams // len(endpoints) + (index < streams % len(endpoints)) for index in range(len(endpoints))]
    readers = [start_reader(url, count, tokens, key) for (url, key), count in zip(endpoints, counts, strict=True)]
    found = [json.loads(reader.communicate()[0]) for reader in readers]
    if sum(one["complete"] for one in found) != streams:
        raise ChairliftError("some streams were not complete")
    seconds = max(one["last"] for one in found) - min(one["began"] for one in found)
    first = [1000 * one for part in found for one in part["first_seconds"]]
    return _Run(streams * tokens, seconds, sum(one["events"] for one in found), first)


def _figures(runs: Sequence[_Run]) -> dict[str, Any]:
    """The median rate of the runs, and the times to first token of all."""
    first = [one for run in runs for one in run.first_ms]
    cuts = quantiles(first, n=100, method="inclusive") if len(first) > 1 else first * 99
    return {
        "tokens_per_s": median(run.tokens / run.seconds for run in runs),
        "ttft_p50_ms": cuts[49],
        "ttft_p99_ms": cuts[98],
        "tokens_per_event": sum(run.tokens for run in runs) / sum(run.events for run in runs),
    }


@contextmanager
def _fleet(settings: IngressSettings, streams: int) -> Iterator[tuple[Endpoint, list[Endpoint]]]:
    """Start a fleet of stub engines; yields the ingress and the replicas."""
    from ray import serve

    from chairlift.cluster.serving.control import start_fleet, stop_fleet
    from chairlift.cluster.serving.routing_table import REPLICAS

    per_replica = max(1.0, streams / settings.replicas)
    config = ServerConfig(
        settings.model,
        ["stub"],
        engine={"tokens_per_s": per_replica * 1000 / settings.token_ms},
        port=0,
        limits=Limits(max_waiting=100_000),
        engine_module=STUB,
        drain_timeout=1.0,
        quiet=True,
    )
    options = ClusterOptions(replicas=settings.replicas, router="round-robin", replica_cpus=0)
    url = start_fleet(FLEET, config, options)
    try:
        handle = serve.get_deployment_handle(REPLICAS, FLEET)
        found = handle.broadcast("record_replica_metadata").results()
        yield (url, ""), [(one["address"], one["key"]) for one in found]
    finally:
        stop_fleet(FLEET)


@contextmanager
def _handle_streaming(settings: IngressSettings, port: int) -> Iterator[Endpoint]:
    """Start the same stubs as generators behind Ray Serve's proxy and handles."""
    from ray import serve

    from chairlift_lab.bench.ingress.handle_app import make_handle_app

    serve.run(make_handle_app(settings.replicas, settings.token_ms / 1000), name=PROXIED, route_prefix="/")
    try:
        yield f"http://127.0.0.1:{port}", ""
    finally:
        serve.delete(PROXIED)

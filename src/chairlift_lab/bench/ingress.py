"""Streams of stub engines on three paths: from the servers, through the ingress, and through Ray Serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import typer

from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.ray_runtime import connect
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import percentile
from chairlift_lab.common.model_shapes import TokenizerModel
from chairlift_lab.common.stub_engine import StreamTotals, read_in_processes
from chairlift_lab.load.local_server import free_port, local_fleet
from chairlift_lab.report.options import Count, Positive, Settings, number_list

END = b"data: [DONE]\n\n"


class StubGenerator:
    """Yields the events of a stream at fixed times."""

    def __init__(self, token_seconds: float) -> None:
        self._token_seconds = token_seconds

    async def stream(self, tokens: int) -> AsyncIterator[bytes]:
        event = b"data: " + json.dumps({"choices": [{"index": 0, "text": " token"}]}).encode() + b"\n\n"
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(tokens):
            due += self._token_seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield event
        yield END


class HandleIngress:
    def __init__(self, generators: Any) -> None:
        self._generators = generators.options(stream=True, method_name="stream")

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        tokens = (await request.json())["max_tokens"]
        return StreamingResponse(self._generators.remote(tokens), media_type="text/event-stream")


def make_handle_app(replicas: int, token_seconds: float) -> Any:
    from ray import serve

    common: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1_000_000}
    generators = serve.deployment(StubGenerator, num_replicas=replicas, **common)
    return serve.deployment(HandleIngress, **common).bind(generators.bind(token_seconds))


FLEET, PROXIED = "chairlift-bench", "chairlift-bench-handle"
WARM_UP_TOKENS = 5

Endpoint = tuple[str, str]
"""Address and API key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings(Settings):
    streams: Annotated[Sequence[int], number_list("Concurrent streams, one run for each number.")] = (8, 32)
    tokens: Annotated[Count, typer.Option(help="Tokens of each stream.")] = 200
    token_ms: Annotated[Positive, typer.Option(help="Milliseconds between the tokens of a stream.")] = 5.0
    replicas: Annotated[Count, typer.Option(help="Replicas of the fleet.")] = 2
    repeat: Annotated[Count, typer.Option(help="Runs of each path, in turn.")] = 5
    model: TokenizerModel = DEFAULT_MODEL


def measure_ingress(settings: IngressSettings, address: str, note: Callable[[str], None]) -> list[dict[str, Any]]:
    connect(address, log_to_driver=False)
    from ray import serve

    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    rows = []
    for streams in settings.streams:
        note(f"starting the fleet for {streams} streams")
        with _fleet(settings, streams) as (ingress, replicas), _handle_streaming(settings, port) as proxied:
            paths = {"direct": replicas, "ingress": [ingress], "Ray handle": [proxied]}
            runs_by_path: dict[str, list[StreamTotals]] = {name: [] for name in paths}
            for endpoints in paths.values():
                read_in_processes(endpoints, streams, WARM_UP_TOKENS)
            for round_number in range(settings.repeat):  # Paths take turns, so that a disturbance meets all.
                note(f"{streams} streams, round {round_number + 1}")
                for name, endpoints in paths.items():
                    runs_by_path[name].append(read_in_processes(endpoints, streams, settings.tokens))
            rows += [
                {"path": name, "streams": streams, **_figures(runs, streams * settings.tokens)}
                for name, runs in runs_by_path.items()
            ]
    return rows


def _figures(runs: Sequence[StreamTotals], tokens: int) -> dict[str, Any]:
    """The median rate of the runs of this number of tokens, and the times to first token of all."""
    first = [1000 * seconds for run in runs for seconds in run.first_seconds]
    return {
        "tokens_per_s": median(tokens / run.seconds for run in runs),
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p99_ms": percentile(first, 99),
        "tokens_per_event": len(runs) * tokens / sum(run.events for run in runs),
    }


@contextmanager
def _fleet(settings: IngressSettings, streams: int) -> Iterator[tuple[Endpoint, list[Endpoint]]]:
    """Start a fleet of stub engines; yields the ingress and the replicas."""
    from ray import serve

    from chairlift.cluster.serving.routing_table import REPLICAS
    from chairlift_lab.common.stub_engine import stub_config

    per_replica = max(1.0, streams / settings.replicas)
    config = stub_config(settings.model, per_replica * 1000 / settings.token_ms, drain_timeout=1.0)
    options = ClusterOptions(replicas=settings.replicas, router="round-robin", replica_cpus=0)
    with local_fleet(FLEET, config, options) as (url, _):
        handle = serve.get_deployment_handle(REPLICAS, FLEET)
        replicas = handle.broadcast("record_replica_metadata").results()
        yield (url, ""), [(one["address"], one["key"]) for one in replicas]


@contextmanager
def _handle_streaming(settings: IngressSettings, port: int) -> Iterator[Endpoint]:
    """Start the same stubs as generators behind Ray Serve's proxy and handles."""
    from ray import serve

    serve.run(make_handle_app(settings.replicas, settings.token_ms / 1000), name=PROXIED, route_prefix="/")
    try:
        yield f"http://127.0.0.1:{port}", ""
    finally:
        serve.delete(PROXIED)


COLUMNS = (
    Column("Path", "path"),
    Column("Streams", "streams"),
    Column("Tokens/s", "tokens_per_s", ",.0f"),
    Column("TTFT\np50 ms", "ttft_p50_ms", ".1f"),
    Column("TTFT\np99 ms", "ttft_p99_ms", ".1f"),
    Column("Tokens per\nevent", "tokens_per_event", ".2f"),
)


@bench("ingress", "chairlift bench ingress", "chairlift bench ingress --streams 8,32 --tokens 200")
def bench_ingress(
    note: Note,
    settings: IngressSettings,
    address: Annotated[str, typer.Option(help="Ray cluster; local starts one.")] = "local",
) -> BenchResult:
    """Streams through the ingress of a fleet, beside those from its servers and through Ray Serve itself.

    The engines are stubs that generate one token for every stream at fixed
    times. "direct" reads from the replicas' servers, "ingress" through the
    fleet's ingress, and "Ray handle" from a generator behind Ray Serve's HTTP
    proxy and a streaming handle. Needs chairlift[ray].
    """
    rows = measure_ingress(settings, address, note)
    return BenchResult(asdict(settings), rows, [Table("The ingress of a fleet", COLUMNS, rows)])

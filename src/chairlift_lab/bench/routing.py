"""The time that an ingress needs to choose a replica, by router and number of replicas."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import process_time
from typing import Annotated, Any

import msgspec
import typer

from chairlift.cluster.routing.policies import ROUTERS
from chairlift.cluster.routing.router import Route
from chairlift.cluster.serving.routed_body import TOKEN_BYTES, read_body
from chairlift.cluster.serving.routing_table import ReplicaInfo, ReplicaLoad, RoutingTable
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.options import Count, Counts, Settings, number_list

PATH = "/v1/completions"
NUM_TOKENS = 800_000  # room of a replica's KV cache: an 8B model on an H200
OPEN_PER_REPLICA = 8
REQUESTS_PER_GROUP = 20
REPORTS = 5  # How often all replicas report.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings(Settings):
    replicas: Annotated[Counts, number_list("Replicas, one run for each number.")] = (10, 100, 1000)
    prompt_tokens: Annotated[Count, typer.Option(help="Tokens of a prompt, of four bytes each.")] = 1000
    requests: Annotated[Count, typer.Option(help="Requests of a run.")] = 4000
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0

    def bodies(self) -> list[bytes]:
        """Prompts in random order whose first half is that of their group."""
        source = random.Random(f"routing {self.seed}")
        half = self.prompt_tokens * TOKEN_BYTES // 2
        groups = [source.randbytes(half).hex()[:half] for _ in range(1 + self.requests // REQUESTS_PER_GROUP)]
        prompts = (source.choice(groups) + source.randbytes(half).hex()[:half] for _ in range(self.requests))
        return [msgspec.json.encode({"model": "bench", "prompt": prompt, "max_tokens": 200}) for prompt in prompts]


def measure_routing(settings: RoutingSettings, note: Callable[[str], None]) -> list[dict[str, Any]]:
    bodies = settings.bodies()
    rows = []
    for router in ROUTERS.names():
        for replicas in settings.replicas:
            note(f"{router}, {replicas} replicas")
            rows.append({"router": router, "replicas": replicas, **_measure(router, replicas, bodies)})
    return rows


def _measure(router: str, replicas: int, bodies: Sequence[bytes]) -> dict[str, Any]:
    table = RoutingTable(router)
    info = ReplicaInfo("http://127.0.0.1:1", "key", NUM_TOKENS, "1", 1, "node")
    names = [f"replica-{index}" for index in range(replicas)]
    table.update((name, info, ReplicaLoad(is_ready=index > 0 or replicas == 1)) for index, name in enumerate(names))
    start_time = process_time()
    requests = [read_body(PATH, body, with_keys=table.reads_prefixes) for body in bodies]
    read = process_time() - start_time
    choose = noted = 0.0
    open_routes: deque[Route] = deque()
    for request in requests:
        start_time = process_time()
        _, route = table.route(request)
        chosen = process_time()
        table.started(route)
        open_routes.append(route)
        if len(open_routes) > OPEN_PER_REPLICA * replicas:
            table.ended(open_routes.popleft(), 200)
        choose += chosen - start_time
        noted += process_time() - chosen
    start_time = process_time()
    for number in range(1, REPORTS + 1):
        load = ReplicaLoad(pending_tokens=number, held_tokens=number)
        table.update((name, info, load) for name in names)
    reports = (process_time() - start_time) / REPORTS
    total = (read + choose + noted) / len(bodies)
    return {
        "read_us": 1e6 * read / len(bodies),
        "choose_us": 1e6 * choose / len(bodies),
        "note_us": 1e6 * noted / len(bodies),
        "report_ms": 1e3 * reports,
        "requests_per_s": (1 - reports) / total,  # the reports of all replicas come every second
    }


COLUMNS = (
    Column("Router", "router"),
    Column("Replicas", "replicas"),
    Column("Read the\nbody µs", "read_us", ",.0f"),
    Column("Choose\nµs", "choose_us", ",.1f"),
    Column("Note start\nand end µs", "note_us", ",.1f"),
    Column("Take the\nreports ms", "report_ms", ",.2f"),
    Column("Requests/s\nof a core", "requests_per_s", ",.0f"),
)


@bench("routing", "chairlift bench routing", "chairlift bench routing --replicas 1000 --prompt-tokens 12000")
def bench_routing(
    note: Note,
    settings: RoutingSettings,
) -> BenchResult:
    """The time that an ingress needs to choose a replica, by router and size of the fleet.

    Half of each prompt is shared with the others of its group, and one replica
    is restarting, as is usual in a large fleet. Times are the processor's: reading
    the body with the keys of its prefixes, the choice, noting first tokens and
    ends, and taking the reports of all replicas, which come once per second.
    No server, engine or Ray is involved.
    """
    rows = measure_routing(settings, note)
    return BenchResult(asdict(settings), rows, [Table("The router of an ingress", COLUMNS, rows)])

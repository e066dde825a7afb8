"""`chairlift bench routing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.lists import number_list

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
    replicas: Annotated[Sequence[int], number_list("Replicas, one run for each number.")] = (10, 100, 1000),
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt, of four bytes each.")] = 1000,
    requests: Annotated[int, typer.Option(help="Requests of a run.")] = 4000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
) -> BenchResult:
    """The time that an ingress needs to choose a replica, by router and size of the fleet.

    Half of each prompt is shared with the others of its group, and one replica
    is restarting, as is usual in a large fleet. Times are the processor's: reading
    the body with the keys of its prefixes, the choice, noting first tokens and
    ends, and taking the reports of all replicas, which come once per second.
    No server, engine or Ray is involved.
    """
    from chairlift_lab.bench.routing.run import RoutingSettings, measure_routing

    counts = {"replicas": min(replicas), "prompt_tokens": prompt_tokens, "requests": requests}
    for name, value in counts.items():
        if value < 1:
            raise InvalidParameter(name, f"must be at least 1, got {value}")
    settings = RoutingSettings(list(replicas), prompt_tokens, requests, seed)
    rows = measure_routing(settings, note)
    return BenchResult(asdict(settings), rows, [Table("The router of an ingress", COLUMNS, rows)])

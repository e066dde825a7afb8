"""`chairlift bench ingress`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.lists import number_list

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
    streams: Annotated[Sequence[int], number_list("Concurrent streams, one run for each number.")] = (8, 32),
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 200,
    token_ms: Annotated[float, typer.Option(help="Milliseconds between the tokens of a stream.")] = 5.0,
    replicas: Annotated[int, typer.Option(help="Replicas of the fleet.")] = 2,
    repeat: Annotated[int, typer.Option(help="Runs of each path, in turn.")] = 5,
    model: Annotated[str, typer.Option("--model", "-m", help="Model whose tokenizer is loaded.")] = DEFAULT_MODEL,
    address: Annotated[str, typer.Option(help="Ray cluster; local starts one.")] = "local",
) -> BenchResult:
    """Streams through the ingress of a fleet, beside those from its servers and through Ray Serve itself.

    The engines are stubs that generate one token for every stream at fixed
    times. "direct" reads from the replicas' servers, "ingress" through the
    fleet's ingress, and "Ray handle" from a generator behind Ray Serve's HTTP
    proxy and a streaming handle. Needs chairlift[ray].
    """
    from chairlift_lab.bench.ingress.run import IngressSettings, measure_ingress

    for name, value in (("tokens", tokens), ("replicas", replicas), ("repeat", repeat)):
        if value < 1:
            raise InvalidParameter(name, f"must be at least 1, got {value}")
    if not token_ms > 0:
        raise InvalidParameter("token_ms", f"must be above 0, got {token_ms}")
    settings = IngressSettings(model, list(streams), tokens, token_ms, replicas, repeat)
    rows = measure_ingress(settings, address, note)
    return BenchResult(asdict(settings), rows, [Table("The ingress of a fleet", COLUMNS, rows)])

"""A bench: how long a model takes from loading to its first token."""

import time
from typing import Annotated

import typer

from chairlift import SamplingParams
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench

COLUMNS = (
    Column("Start", "name"),
    Column("Load s", "load_seconds", ".2f"),
    Column("First token ms", "first_token_ms", ".1f"),
)


@bench("load-time", "chairlift bench load-time --starts 3 --json result.json")
def bench_load_time(
    engine: EngineOptions,
    note: Note,
    starts: Annotated[int, typer.Option(help="How many times to load the model.")] = 2,
) -> BenchResult:
    """Seconds to load a model, and milliseconds to its first token."""
    rows = []
    for number in range(1, starts + 1):
        note(f"start {number} of {starts}")
        begun = time.perf_counter()
        llm = engine.load()
        loaded = time.perf_counter()
        llm.generate("Hello", SamplingParams(max_tokens=1))
        answered = time.perf_counter()
        rows.append({"name": f"{number}", "load_seconds": loaded - begun, "first_token_ms": 1e3 * (answered - loaded)})
    settings = {"model": engine.model, "starts": starts}
    return BenchResult(settings, rows, [Table("Load time", COLUMNS, rows)])

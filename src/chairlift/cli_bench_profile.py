"""`chairlift bench profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chairlift.bench.report import check_writable
from chairlift.cli_bench_output import show_table, watch
from chairlift.cli_options import EngineOptions, with_option_groups
from chairlift.errors import InvalidParameter


@with_option_groups
def bench_profile(
    engine: EngineOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it, as JSON.")] = Path("profile.json"),
    rounds: Annotated[int, typer.Option(help="More rounds, better figures.")] = 3,
) -> None:
    """Learn what steps cost on this machine, for chairlift simulate --profile."""
    from chairlift.bench.profile import measure_profile
    from chairlift.execution.config import EngineConfig
    from chairlift.execution.startup import load_engine

    if rounds < 1:
        raise InvalidParameter("rounds", f"must be at least 1, got {rounds}")
    check_writable(out, parameter="out")
    config = EngineConfig(**engine.config())
    with watch(enabled=not engine.quiet) as note:
        note("loading")
        started = load_engine(engine.model, config, progress=not engine.quiet)
        profile = measure_profile(started.engine, rounds=rounds, note=note)
    scheduler = started.engine.scheduler
    profile.save(
        out,
        {
            "model": engine.model,
            "kv_blocks": scheduler.kv.num_blocks,
            "max_batch_requests": scheduler.max_batch_requests,
            "max_batch_tokens": config.batch_tokens(),
        },
    )
    rows = [[name, f"{1e6 * value:,.3f}"] for name, value in profile.coefficients.items()]
    show_table("Microseconds per", ["", ""], rows, f"{profile.steps:,} steps; typical error {profile.error:.1%}")
    Console().print(f"Written to {out}", highlight=False)

"""`chairlift record`: record a server's dashboard to a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.client.blocking import BlockingClient
from chairlift.client.http import Address
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.dashboard.page import RunSummary, check_suffix, write_run
from chairlift.terminal.console import note


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift record run.lift --seconds 30",
        "chairlift record run.html --url http://gpu-server:8000 --api-key SECRET",
    ],
)
def record(
    out: Annotated[Path, typer.Argument(help="File to write: run.lift for the dashboard, run.html for any browser.")],
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    seconds: Annotated[float, typer.Option(help="Duration; Ctrl-C ends it sooner.", min=0.1)] = 10.0,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.", envvar="CHAIRLIFT_API_KEY")] = None,
) -> None:
    """Record what a server's dashboard shows, as a file that opens without the server.

    The engine never waits for the recording: frames that come too fast for the
    connection are dropped and counted.
    """
    check_suffix(out)
    if not out.absolute().parent.is_dir():
        raise InvalidParameter("out", f"the folder {out.parent} does not exist")
    client = BlockingClient(Address.parse(url), api_key=api_key)
    lines: list[bytes] = []
    end = time.monotonic() + seconds
    try:
        for line in client.watch("/dashboard/stream"):
            lines.append(line)
            if time.monotonic() >= end:
                break
    except KeyboardInterrupt:
        pass
    run = RunSummary.of(lines)
    if not run.has_keyframe:
        raise ChairliftError("nothing was recorded: the engine did not answer in that time")
    write_run(out, lines)
    size = out.stat().st_size / 1024
    lost = f", {run.lost} frames lost" if run.lost else ""
    note(f"{out}: {run.steps:,} steps of {run.requests:,} requests in {run.seconds:.1f} s, {size:,.0f} KB{lost}")

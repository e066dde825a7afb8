"""`chairlift batch`: answer a file of requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.cli.app import RUN, app
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions, refuse_engine_options, refuse_given

if TYPE_CHECKING:
    from chairlift.server.batch.run import BatchRun, ProgressCallback
    from chairlift.server.config import ServerConfig

_SERVER, _RAY = "Server", "Ray"


@app.command(
    group=RUN,
    examples=[
        "chairlift batch requests.jsonl answers.jsonl",
        "chairlift batch requests.jsonl answers.jsonl --model Qwen/Qwen3-0.6B --served-model-name gpt-4o-mini",
        "chairlift batch requests.jsonl answers.jsonl --url http://localhost:8000 --concurrency 64",
        "chairlift batch requests.jsonl answers.jsonl --ray --workers 4",
    ],
)
def batch(
    context: typer.Context,
    engine: EngineOptions,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help='Lines of {"custom_id": "a", "method": "POST", "url": "/v1/…", "body": {…}}.'
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File for the answers, one per line.")],
    concurrency: Annotated[
        int, typer.Option(help="Requests in flight at a time; with --ray, at each worker.", min=1)
    ] = 256,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model in the requests.", show_default="as --model"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Send the requests to this server.", rich_help_panel=_SERVER, show_default="run it here"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The key for --url.", envvar="CHAIRLIFT_API_KEY", rich_help_panel=_SERVER)
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Run on a Ray cluster: the one in RAY_ADDRESS, one on this machine, or else a new one.",
            rich_help_panel=_RAY,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Engines, each in a worker.",
            min=1,
            rich_help_panel=_RAY,
            show_default="one per GPU, or per machine without GPUs",
        ),
    ] = None,
    worker_cpus: Annotated[
        int | None,
        typer.Option(
            help="CPUs of a worker.", min=1, rich_help_panel=_RAY, show_default="1 beside a GPU, else all that fit"
        ),
    ] = None,
    worker_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of a worker.", min=0, rich_help_panel=_RAY, show_default="1 if there are any"),
    ] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Requests get the same answers as from the server, in any order. Repeating
    the command continues an interrupted run: no line is lost or answered twice.
    """
    from chairlift.server.batch.run import BatchRun

    if not ray:
        refuse_given(context, ("workers", "worker_cpus", "worker_gpus"), "needs --ray")
    if url is not None:
        refuse_given(context, ("ray",), "starts engines, but --url names a server")
        refuse_engine_options(context)
        refuse_given(context, ("model", "served_model_name"), "is for an own engine, but --url names a server")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    run = BatchRun(source, target, concurrency=concurrency)
    if run.done_before:
        note(f"{run.done_before:,} of {run.total:,} requests were answered before")
    try:
        if not run.is_complete:
            with _watch(run, enabled=not engine.quiet) as watch:
                if ray:
                    _answer_on_ray(
                        run, engine, served_model_name, concurrency, (workers, worker_cpus, worker_gpus), watch
                    )
                else:
                    asyncio.run(_answer(run, engine, served_model_name, url, api_key, watch))
    except ChairliftError:
        if run.counts.answered or run.counts.failed:
            note("Repeat the command to continue.")
        raise
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    finally:
        run.output.close()
    counts = run.counts
    note(f"{counts.answered:,} answered, {counts.failed:,} failed, {counts.output_tokens:,} tokens generated")


async def _answer(
    run: BatchRun,
    engine: EngineOptions,
    name: str | None,
    url: str | None,
    api_key: str | None,
    on_progress: ProgressCallback,
) -> None:
    from chairlift.client.http import Address, HttpClient
    from chairlift.server.batch.run import remote_server
    from chairlift.server.front_end import own_engine

    # Cancel on SIGTERM, as on Ctrl-C, so that the engine exits before this process.
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    if url is not None:
        target = remote_server(HttpClient(Address.parse(url), api_key=api_key))
    else:
        target = own_engine(_server_config(engine, name, quiet=engine.quiet))
    async with target as send:
        await run.run(send, on_progress)


def _server_config(engine: EngineOptions, name: str | None, *, quiet: bool) -> ServerConfig:
    from chairlift.server.config import ServerConfig
    from chairlift.server.wire.limits import Limits

    limits = Limits(max_waiting=sys.maxsize)  # limited by --concurrency
    names = [name] if name is not None else []
    level = "error" if quiet else "info" if engine.verbose else "warning"
    return ServerConfig(engine.model, names, engine.config(), limits=limits, log_level=level, quiet=quiet)


def _answer_on_ray(
    run: BatchRun,
    engine: EngineOptions,
    name: str | None,
    concurrency: int,
    wanted: tuple[int | None, int | None, float | None],
    on_progress: ProgressCallback,
) -> None:
    from chairlift.cluster.batch import RayBatch, choose_resources
    from chairlift.cluster.ray_runtime import cluster_nodes, connect, disconnect

    config = _server_config(engine, name, quiet=True)  # The startup details of every worker are left out.
    started_here = connect(log_to_driver=not engine.quiet)
    signal.signal(signal.SIGTERM, _exit)  # end the workers, as on Ctrl-C
    try:
        nodes = cluster_nodes()
        resources = choose_resources(nodes, engine.device, *wanted)
        fitting = resources.num_fitting(nodes)
        problem = f"{resources.num_workers:,} workers with {resources} each, but only {fitting:,} fit on the machines"
        if fitting < resources.num_workers and started_here:
            raise InvalidParameter("workers", problem)
        if fitting < resources.num_workers:
            note(f"{problem} of the cluster: the others start when it has grown")
        RayBatch(run, config, resources, concurrency).run(on_progress)
    finally:
        disconnect()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _watch(run: BatchRun, *, enabled: bool) -> Iterator[ProgressCallback]:
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    shown = enabled and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, refresh_per_second=2) as progress:
        task = progress.add_task("answering", total=run.total, completed=run.done_before, state="starting")

        def watch(run: BatchRun) -> None:
            counts = run.counts
            speed = counts.output_tokens / max(progress.tasks[task].elapsed or 0.0, 1e-9)
            state = f"{speed:,.0f} tokens/s" + (f", {counts.failed:,} failed" if counts.failed else "")
            progress.update(task, completed=run.done_before + counts.answered + counts.failed, state=state)

        yield watch

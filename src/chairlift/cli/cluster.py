"""`chairlift cluster`: a fleet of replicas on Ray."""

from __future__ import annotations

import json
import signal
import threading
from typing import Annotated, Any

import typer

from chairlift.cli.app import SERVERS, app
from chairlift.cluster.options import ClusterOptions
from chairlift.errors import InvalidParameter
from chairlift.server.options import ServerOptions
from chairlift.terminal.commands import CommandGroup, Commands
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import show_table

DEFAULT_NAME = "chairlift"
WATCH_SECONDS = 2.0
NO_TOKEN = (
    "warning: this Ray cluster has no authentication: anyone who reaches its ports can run code on its machines. "
    "Start it with RAY_AUTH_MODE=token, or keep strangers away from its ports (docs/cluster.md).\n"
)

Name = Annotated[str, typer.Option(help="Name of the fleet on the Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray cluster: HOST:PORT, auto for the one on this machine, or local for a new one.",
        show_default="RAY_ADDRESS, else the one on this machine, else a new one",
    ),
]

cluster_app = Commands(
    cls=CommandGroup,
    help="Serve a model by several replicas, on one or many machines. Needs chairlift[ray].",
    examples=["chairlift cluster serve --replicas 2", "chairlift cluster status", "chairlift cluster stop"],
)
app.add_typer(cluster_app, name="cluster", rich_help_panel=SERVERS)


@cluster_app.command(
    examples=[
        "chairlift cluster serve --replicas 2",
        "chairlift cluster serve Qwen/Qwen3-0.6B --replicas 2 --max-replicas 8 --replica-gpus 1 --host 0.0.0.0",
        "chairlift cluster serve --address auto --detach --replicas 4 --router prefix-affine",
    ],
)
def serve(
    cluster: ClusterOptions,
    server: ServerOptions,
    engine: EngineOptions,
    name: Name = DEFAULT_NAME,
    address: Address = None,
    detach: Annotated[bool, typer.Option(help="Return once the fleet is ready, and leave it running.")] = False,
) -> None:
    """Serve a model by replicas behind one address.

    Joins a Ray cluster, or starts one on this machine. If the fleet is running
    already, its replicas are replaced one by one by those with the new options.
    Ctrl-C stops the fleet, after its requests in flight are answered.
    """
    from chairlift.cluster.ray_runtime import connect, is_authenticated
    from chairlift.cluster.serving.fleet import fleet_config, start_fleet, stop_fleet

    config = fleet_config(server, engine.model, engine.config(), quiet=engine.quiet, verbose=engine.verbose)
    own = connect(address, log_to_driver=not engine.quiet)
    if not is_authenticated():
        note(NO_TOKEN)
    if detach and own:
        raise InvalidParameter(
            "detach", "needs a Ray cluster that outlives this command: start one with ray start --head"
        )
    listening = start_fleet(name, config, cluster)
    note(f"Serving {config.model_name} at {listening} by {cluster.replicas} replicas.\n")
    if not detach and _wait_for_end(name):
        stop_fleet(name)


def _wait_for_end(name: str) -> bool:
    """Wait for a signal, or for the end of the fleet; return whether it is still there."""
    from chairlift.cluster.serving.fleet import is_running

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(WATCH_SECONDS):
        if not is_running(name):
            return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    note("Stopping the fleet once its running requests are answered; Ctrl-C again stops at once.")
    return True


@cluster_app.command(examples=["chairlift cluster status", "chairlift cluster status --json"])
def status(
    name: Name = DEFAULT_NAME,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the replicas of a fleet: their state, load, hit rate and version."""
    from chairlift.cluster.ray_runtime import connect
    from chairlift.cluster.serving.fleet import fleet_status

    connect(address or "auto", log_to_driver=False)
    fleet = fleet_status(name)
    if as_json:
        typer.echo(json.dumps(fleet, indent=2))
        return
    if fleet["address"] is None:
        note(f"{name}: {fleet['state']}, no ingress is running. {fleet['problem']}".rstrip() + "\n")
        return
    show_table(
        f"{name}: {fleet['state']} at {fleet['address']}, router {fleet['router']}",
        ("Replica", "State", "Address", "Running", "Waiting", "KV in use", "Hit rate", "Version"),
        [_row(replica) for replica in fleet["replicas"]],
    )


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    load = replica["load"]
    return (
        replica["id"],
        replica["state"],
        replica["address"],
        str(load["running"]),
        str(load["waiting"]),
        f"{load['held_tokens'] / replica['num_tokens']:.0%}",
        f"{load['hit_rate']:.0%}",
        replica["version"],
    )


@cluster_app.command(examples=["chairlift cluster stop", "chairlift cluster stop --address ray-head:6379"])
def stop(name: Name = DEFAULT_NAME, address: Address = None) -> None:
    """Stop a fleet once its requests in flight are answered. Ray itself goes on."""
    from chairlift.cluster.ray_runtime import connect
    from chairlift.cluster.serving.fleet import stop_fleet

    connect(address or "auto", log_to_driver=False)
    stop_fleet(name)
    note(f"The fleet {name} is stopped.\n")

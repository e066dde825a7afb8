"""`chairlift ps` and `chairlift stop`: the servers of this user on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.cli.app import SERVERS, app
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options import format_bytes
from chairlift.terminal.console import note
from chairlift.terminal.tables import show_table

if TYPE_CHECKING:
    from chairlift.server.process.running import RunningServer, ServerStatus

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 30.0  # A server that drains no more has this long to end its engine and exit.
NONE_RUNS = "no server of yours runs on this machine; `chairlift serve` starts one"


@app.command(group=SERVERS, examples=["chairlift ps", "chairlift ps --json"])
def ps(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List your running servers on this machine: model, address, process, age, memory and requests.

    The memory is that of the server's processes, without that of a GPU. Fleets
    are listed by `chairlift cluster status`.
    """
    from chairlift.server.process.running import running_servers

    servers = running_servers()
    if as_json:
        typer.echo(json.dumps({"servers": [_describe(server) for server in servers]}, indent=2))
        return
    if not servers:
        note(f"{NONE_RUNS[0].upper()}{NONE_RUNS[1:]}.")
        return
    headings = ("Model", "Address", "PID", "State", "Since", "Memory", "Run", "Wait")
    show_table("Servers", headings, [_row(server) for server in servers])


def _describe(server: RunningServer) -> dict[str, Any]:
    status = server.status
    fields = ("model", "address", "started", "state", "running", "waiting", "open")
    known = {name: getattr(status, name) if status is not None else None for name in fields}
    return known | {"pid": server.pid, "memory_bytes": server.memory}


def _row(server: RunningServer) -> tuple[str, ...]:
    memory = "-" if server.memory is None else format_bytes(server.memory)
    status = server.status
    if status is None:
        return ("?", "-", str(server.pid), "silent", "-", memory, "-", "-")
    since = _age(time.time() - status.started)
    counts = (str(status.running), str(status.waiting))
    return (status.model, status.address, str(server.pid or "-"), status.state, since, memory, *counts)


def _age(seconds: float) -> str:
    """90 -> 1 min."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


@app.command(
    group=SERVERS,
    examples=["chairlift stop", "chairlift stop qwen3-0.6b", "chairlift stop localhost:8000", "chairlift stop --all"],
)
def stop(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|ADDRESS|PID",
            help="Which server: its model, address, :port or process id.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all your servers on this machine.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests in flight.")] = False,
) -> None:
    """Stop a server: it refuses new requests, answers those in flight, and exits.

    Without an argument the only server that runs is stopped. Ctrl-C ends the
    waiting, not the stop.
    """
    from chairlift.server.process.running import running_servers

    if everything and target is not None:
        raise InvalidParameter("target", "names one server, but --all means all of them")
    chosen = _chosen(running_servers(), target, everything=everything)
    stopping = [_Stopping(server) for server in chosen]
    for each in stopping:
        each.begin(now=now)
    for each in stopping:
        each.wait()


def _chosen(servers: list[RunningServer], target: str | None, *, everything: bool) -> list[RunningServer]:
    """The servers to stop; raises unless it is clear which."""
    if everything:
        if not servers:
            note(f"Nothing to stop: {NONE_RUNS}.")
        return servers
    meant = servers if target is None else [server for server in servers if server.is_meant(target)]
    if len(meant) == 1:
        return meant
    listed = ", ".join(_title(server) for server in meant or servers)
    if not servers:
        raise ChairliftError(NONE_RUNS)
    if not meant:
        is_port = any(server.is_meant(f":{target}") for server in servers)
        hint = f"did you mean :{target}?" if is_port else f"there are {listed}"
        raise InvalidParameter("target", f"no server of yours is {target!r}; {hint}")
    way_out = "say which by its address or process id, or give --all"
    raise InvalidParameter("target", f"{len(meant)} servers match: {listed}; {way_out}")


def _title(server: RunningServer) -> str:
    if server.status is None:
        return f"process {server.pid}"
    return f"{server.status.model} at {server.status.address} (process {server.pid})"


@dataclass(slots=True)
class _Stopping:
    """A server that was asked to stop."""

    server: RunningServer
    deadline: float = 0.0
    told: str = ""

    def begin(self, *, now: bool) -> None:
        from chairlift.server.process.running import request_stop

        status = request_stop(self.server, now=now)
        patience = PATIENCE_SECONDS + (status.drain_seconds if status is not None and not now else 0.0)
        self.deadline = time.monotonic() + patience
        self._tell(None if now else status)

    def wait(self) -> None:
        """Return once the server is gone; says what it still waits for."""
        from chairlift.server.process.running import poll

        alive, status = poll(self.server)
        while alive:
            if time.monotonic() > self.deadline:
                problem = "does not stop" if status is not None else "does not answer"
                raise ChairliftError(f"{_title(self.server)} {problem}; `kill -9 {self.server.pid}` would end it")
            self._tell(status)
            time.sleep(POLL_SECONDS)
            alive, status = poll(self.server)
        note(f"{_title(self.server)} is stopped.")

    def _tell(self, status: ServerStatus | None) -> None:
        if status is None or not status.open:
            text = f"Stopping {_title(self.server)}."
        else:
            requests = "1 request" if status.open == 1 else f"{status.open} requests"
            text = f"Stopping {_title(self.server)}: waiting for {requests}, at most {status.drain_seconds:g} s."
        if text != self.told and (not self.told or (status is not None and status.open)):
            note(text)
            self.told = text

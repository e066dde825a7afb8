"""The requests and the peers of `chairlift bench throughput`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.terminal.options import EngineOptions, given, refuse_given
from chairlift_lab.bench.throughput.run import ThroughputComparison
from chairlift_lab.common.workload import LengthRange, Workload, load_workload, make_workload
from chairlift_lab.peers.peers import PEERS, Peer, parse_peer_paths, parse_peers
from chairlift_lab.report.lists import parse_numbers

_WORKLOAD, _PEERS = "Workload", "Peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWorkload:
    """Random requests, or those of a file."""

    requests: Annotated[
        int,
        typer.Option(help="Number of requests; with --workload, the first of the file.", rich_help_panel=_WORKLOAD),
    ] = 64
    prompt_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.", rich_help_panel=_WORKLOAD),
    ] = "16:512"
    output_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Output tokens, log-uniform.", rich_help_panel=_WORKLOAD),
    ] = "16:256"
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_WORKLOAD)] = 0
    workload: Annotated[
        Path | None,
        typer.Option(
            help='Read the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.',
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Requests per step of every engine that batches; a table for each N.",
            rich_help_panel=_WORKLOAD,
            show_default="from the machine",
        ),
    ] = None

    def concurrencies(self, engine: EngineOptions) -> list[int | None]:
        if self.concurrency is None:
            return [None]
        if engine.max_batch_requests is not None:
            raise InvalidParameter("concurrency", "means max_batch_requests for all engines; give only one of them")
        numbers = parse_numbers("concurrency", self.concurrency)
        if min(numbers) < 1:
            raise InvalidParameter("concurrency", f"must be at least 1, got {min(numbers)}")
        if len(set(numbers)) < len(numbers):
            raise InvalidParameter("concurrency", f"{self.concurrency!r} repeats a number")
        return numbers

    def make(self, context: typer.Context, comparison: ThroughputComparison) -> tuple[Workload, dict[str, Any]]:
        """The requests, and their source for the report."""
        lengths = {name: LengthRange.parse(name, getattr(self, name)) for name in ("prompt_len", "output_len")}
        if self.workload is None:
            work = make_workload(comparison.vocabulary(), requests=self.requests, seed=self.seed, **lengths)
            drawn = {name: str(length) for name, length in lengths.items()}
            return work, {"workload": None, "seed": self.seed} | drawn
        problem = "the requests come from the workload file; give only one of them"
        refuse_given(context, ("prompt_len", "output_len", "seed"), problem)
        work = load_workload(self.workload)
        if given(context, "requests"):
            if not 1 <= self.requests <= len(work.requests):
                raise InvalidParameter("requests", f"must be 1 to {len(work.requests)}, as many as {self.workload} has")
            work = Workload(work.requests[: self.requests])
        return work, {"workload": self.workload.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The peers to run, and what they need."""

    peers: Annotated[
        str | None,
        typer.Option(
            help=f"Other engines to compare with: {', '.join(PEERS)}. One that cannot run here is left out, with the "
            "reason.",
            rich_help_panel=_PEERS,
            show_default="none",
        ),
    ] = None
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON",
            help="The Python that has the peer's package; repeatable.",
            rich_help_panel=_PEERS,
            show_default="this one",
        ),
    ] = None
    peer_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="The model that a peer loads instead of --model; repeatable.",
            rich_help_panel=_PEERS,
            show_default="--model",
        ),
    ] = None
    peer_timeout: Annotated[
        float, typer.Option(help="Seconds for one run of a peer, loading included.", rich_help_panel=_PEERS)
    ] = 900.0

    def make(self, context: typer.Context, comparison: ThroughputComparison) -> list[Peer]:
        from chairlift.loading.resolve import resolve_model

        if self.peers is None:
            refuse_given(context, ("peer_python", "peer_model", "peer_timeout"), "has no effect without --peers")
            return []
        if self.peer_timeout <= 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.peer_timeout:g}")
        names = parse_peers(self.peers)
        pythons = parse_peer_paths("peer_python", self.peer_python or [], names)
        models = parse_peer_paths("peer_model", self.peer_model or [], names)
        settings = comparison.settings()
        if settings["device"] != "cpu":
            raise InvalidParameter("peers", "run on the CPU; add --device cpu")
        default = resolve_model(comparison.model, progress=comparison.progress)
        return [
            Peer(
                name,
                models.get(name, default),
                pythons.get(name, Path(sys.executable)),
                threads=settings["threads"],
                dtype=settings["dtype"],
                timeout=self.peer_timeout,
            )
            for name in names
        ]

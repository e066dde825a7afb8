"""What `chairlift bench throughput` asks of whom: the requests, and the other engines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.throughput.run import Comparison
from chairlift.lab.common.output import parse_numbers
from chairlift.lab.common.workload import LengthRange, Workload, load_workload, make_workload
from chairlift.lab.peers.peers import PEERS, Peer, parse_peer_paths, parse_peers
from chairlift.terminal.options import EngineOptions, given, refuse_given

_WORKLOAD, _PEERS = "Workload", "Peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked of the engines."""

    requests: Annotated[
        int, typer.Option(help="How many requests; with --workload, the first so many.", rich_help_panel=_WORKLOAD)
    ] = 64
    prompt_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Prompt tokens, spread log-uniformly.", rich_help_panel=_WORKLOAD),
    ] = "16:512"
    output_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Output tokens, spread log-uniformly.", rich_help_panel=_WORKLOAD),
    ] = "16:256"
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_WORKLOAD)] = 0
    workload: Annotated[
        Path | None,
        typer.Option(
            help='Take the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.',
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Requests per step, in every engine that batches; several give a table each.",
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
            raise InvalidParameter("concurrency", f"{self.concurrency!r} has one twice")
        return numbers

    def make(self, context: typer.Context, comparison: Comparison) -> tuple[Workload, dict[str, Any]]:
        """The requests, and where they come from."""
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
    """Which other engines run too, and with what."""

    peers: Annotated[
        str | None,
        typer.Option(
            help=f"Other engines to compare with, each in a process of its own: {', '.join(PEERS)}. Those that cannot "
            "run here are left out, with the reason.",
            rich_help_panel=_PEERS,
            show_default="none",
        ),
    ] = None
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON",
            help="The Python that has a peer's package; may be given several times.",
            rich_help_panel=_PEERS,
            show_default="this one",
        ),
    ] = None
    peer_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="What a peer loads instead of --model; may be given several times.",
            rich_help_panel=_PEERS,
            show_default="--model",
        ),
    ] = None
    peer_timeout: Annotated[
        float, typer.Option(help="Seconds for one run of a peer, loading included.", rich_help_panel=_PEERS)
    ] = 900.0

    def make(self, context: typer.Context, comparison: Comparison) -> list[Peer]:
        from chairlift.loading.store import resolve_model

        if self.peers is None:
            refuse_given(context, ("peer_python", "peer_model", "peer_timeout"), "means nothing without --peers")
            return []
        if self.peer_timeout <= 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.peer_timeout:g}")
        names = parse_peers(self.peers)
        pythons = parse_peer_paths("peer_python", self.peer_python or [], names)
        models = parse_peer_paths("peer_model", self.peer_model or [], names)
        settings = comparison.settings()
        if settings["device"] != "cpu":
            raise InvalidParameter("peers", "they run on the CPU; add --device cpu")
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

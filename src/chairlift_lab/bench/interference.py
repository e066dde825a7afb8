"""What requests that generate notice of long prompts that arrive: this engine over HTTP, and peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer

from chairlift.client.http import Address, HttpClient
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.throughput import PeerOptions, ThroughputComparison
from chairlift_lab.common.engines import Measurement, percentile
from chairlift_lab.common.workload import BenchRequest, LengthRange, TokenSource, Workload
from chairlift_lab.load.client import ClosedLoop, LoadClient, LoadGenerator, RequestFormat
from chairlift_lab.load.local_server import MODEL_NAME, local_server
from chairlift_lab.peers.peers import Peer, PeerFailed
from chairlift_lab.planning.what_if import parse_changes
from chairlift_lab.report.options import COLOURS, Count, ReportOptions, Settings, parse_numbers, picture

TIMEOUT = 900.0
ARRIVING = 2  # requests in flight beside those that generate: a long prompt, and after it a short one
_option = partial(typer.Option, rich_help_panel="Traffic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Settings):
    """Requests that generate all the time, and prompts that arrive beside them; lengths are in tokens."""

    decodes: Annotated[str, _option(metavar="N[,N…]", help="Requests that generate; a table for each N.")] = "4,12"
    output: Annotated[int, at_least(16), _option(help="Tokens that each of them generates.")] = 512
    start: Annotated[Count, _option(help="Tokens of their prompts, and of the short prompts.")] = 32
    prompts: Annotated[Count, _option(help="Long prompts, and as many short ones.")] = 4
    prompt_len: Annotated[str, _option(metavar="LOW:HIGH", help="Tokens of a long prompt, log-uniform.")] = "500:4000"
    answer: Annotated[Count, _option(help="Tokens of the answer to a prompt that arrives.")] = 8
    seed: Annotated[int, at_least(0), _option(help="The same seed gives the same requests.")] = 0

    def workload(self, vocabulary: Sequence[int], decodes: int) -> Workload:
        """First the requests that generate, then long and short prompts in turn."""
        rng, lengths = random.Random(self.seed), LengthRange.parse("prompt_len", self.prompt_len)
        words = TokenSource(vocabulary, self.seed)
        requests = [BenchRequest(words.draw(self.start), self.output) for _ in range(decodes)]
        for _ in range(self.prompts):
            requests += [BenchRequest(words.draw(length), self.answer) for length in (lengths.draw(rng), self.start)]
        return Workload(tuple(requests))


@dataclass(frozen=True)
class Interference:
    """One run of the traffic on one engine."""

    name: str
    decodes: int
    measured: Measurement

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each token of a generating request came, and how long after the one before, in seconds."""
        streams = self.measured.token_times[: self.decodes]
        return [(later, later - earlier) for times in streams for earlier, later in pairwise(times)]

    def row(self) -> dict[str, Any]:
        arrivals, times = self.measured.arrivals, self.measured.token_times
        assert arrivals is not None
        waits = [1e3 * (tokens[0] - arrival) for arrival, tokens in zip(arrivals, times, strict=True)][self.decodes :]
        gaps = [1e3 * gap for _, gap in self.gaps]
        output = sum(map(len, times))
        row: dict[str, Any] = {"name": self.name, "decodes": self.decodes}
        row |= {f"gap_p{share}_ms": percentile(gaps, share) for share in (50, 99)} | {"gap_worst_ms": max(gaps)}
        row["worst_of_median"] = row["gap_worst_ms"] / row["gap_p50_ms"]
        for kind, some in (("long", waits[::2]), ("short", waits[1::2])):
            row |= {f"ttft_{kind}_p50_ms": percentile(some, 50), f"ttft_{kind}_worst_ms": max(some)}
        row["output_tokens_per_s"] = output / self.measured.seconds
        row["total_tokens_per_s"] = (output + self.measured.input_tokens) / self.measured.seconds
        return row | {"seconds": self.measured.seconds}


def measure_server(model: str, options: Mapping[str, Any], workload: Workload, in_flight: int) -> Measurement:
    """Start a server, send it a short warm-up and then the workload, and read the times of the streams."""
    with local_server(model, options, max_waiting=in_flight) as server:
        return asyncio.run(_send_all(Address.parse(server.url), workload, in_flight))


async def _send_all(address: Address, workload: Workload, in_flight: int) -> Measurement:
    with closing(HttpClient(address)) as http:
        client, loop = LoadClient(http, RequestFormat(MODEL_NAME), timeout=TIMEOUT), ClosedLoop(in_flight)
        await LoadGenerator(client.send).run(workload.warm_up().requests, loop)
        run = await LoadGenerator(client.send).run(workload.requests, loop)
    problems = [record.error for record in run.records if record.error is not None]
    if problems:
        raise EngineDead(f"the server did not answer all requests: {problems[0]}")
    times = [record.times for record in run.records]
    return Measurement(run.seconds, workload.input_tokens, times, arrivals=[record.sent for record in run.records])


COLUMNS = (
    Column("\nEngine", "name"),
    Column("Gap\np50 ms", "gap_p50_ms", ",.1f"),
    Column("Gap\np99 ms", "gap_p99_ms", ",.0f"),
    Column("Worst\ngap ms", "gap_worst_ms", ",.0f"),
    Column("Of the\nmedian", "worst_of_median", ",.1f", unit="x"),
    Column("Long TTFT\np50 ms", "ttft_long_p50_ms", ",.0f"),
    Column("Short TTFT\np50 ms", "ttft_short_p50_ms", ",.0f"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
    Column("All\ntokens/s", "total_tokens_per_s", ",.0f"),
)


@bench(
    "interference",
    "chairlift bench interference --plot interference.png",
    "chairlift bench interference --decodes 12 --what-if budget=fixed --what-if target_tpot_ms=40",
    "chairlift bench interference --peers llama.cpp,openvino --decodes 4,16 --peer-python llama.cpp=llama/bin/python "
    "--peer-python openvino=ov/bin/python --peer-model openvino=OV_FOLDER",
    report=ReportOptions,
)
def bench_interference(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    traffic: Traffic,
    peer_options: PeerOptions,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE[,NAME=VALUE…]", help="Also measure this engine with these settings; may be repeated."
        ),
    ] = None,
) -> BenchResult:
    """The time between tokens of requests that generate while long prompts arrive.

    A few requests generate all the time. Beside them, long and short prompts
    arrive, the next when one is answered. This engine runs as a server and is
    measured over HTTP; each peer runs in a process and a Python of its own.
    All have the same number of threads, and no prefixes are cached.
    """
    options = {**engine.config(), "prefix_caching": False}
    counts = parse_numbers("decodes", traffic.decodes)
    if min(counts) < 1:
        raise InvalidParameter("decodes", f"must be at least 1, got {min(counts)}")
    LengthRange.parse("prompt_len", traffic.prompt_len)
    own = ThroughputComparison(engine.model, ["chairlift"], options, progress=not engine.quiet)
    peers = peer_options.make(context, own)
    ours = {"chairlift": options}
    for text in what_if or ():
        ours[f"chairlift, {text}"] = {**options, **parse_changes(text)}
    vocabulary, runs, skipped = own.vocabulary(), list[Interference](), dict[str, str]()
    for decodes in counts:
        workload, in_flight = traffic.workload(vocabulary, decodes), decodes + ARRIVING
        for name, settings in ours.items():
            note(f"{name}, {decodes} generating")
            runs.append(Interference(name, decodes, measure_server(engine.model, settings, workload, in_flight)))
        for peer in peers:
            if peer.name not in skipped:
                note(f"{peer.name}, {decodes} generating")
                try:
                    runs.append(Interference(peer.name, decodes, _measure_peer(peer, workload, in_flight)))
                except PeerFailed as failure:
                    skipped[peer.name] = str(failure)
    rows = [run.row() for run in runs]
    tables: list[Table | Line] = []
    for decodes in counts:
        title = f"{decodes} requests generate while prompts of {traffic.prompt_len} tokens arrive"
        tables.append(Table(title, COLUMNS, [row for row in rows if row["decodes"] == decodes]))
    tables += [Line(f"No row for {name}: {reason}") for name, reason in skipped.items()]
    found = {**asdict(traffic), "model": engine.model, "threads": own.machine.threads, "skipped": skipped}
    draw = picture("Time between tokens while long prompts arrive", [partial(_panel, runs, each) for each in counts])
    return BenchResult(found | {"what_if": [*(what_if or ())]}, rows, tables, draw)


def _measure_peer(peer: Peer, workload: Workload, in_flight: int) -> Measurement:
    peer.version()  # raises if it cannot run here, with what it needs
    return peer.measure(workload, in_flight, lambda tokens: None)


def _panel(runs: Sequence[Interference], decodes: int, axes: Any) -> None:
    """Every gap of the generating requests, at the time of the token after it."""
    for colour, run in zip(COLOURS, (run for run in runs if run.decodes == decodes), strict=False):
        times, gaps = zip(*run.gaps, strict=True)
        axes.plot(times, [1e3 * gap for gap in gaps], ".", color=colour, markersize=2, label=run.name)
    axes.set_yscale("log")
    axes.set(title=f"{decodes} requests generate", xlabel="seconds", ylabel="ms after the token before")
    axes.legend(fontsize=8, markerscale=5)
